"""Seeds, and each rank's random state, which is saved as tensors beside a checkpoint's shards (no pickle)."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from toolkit.distributed.comm import on_all_ranks, rank, world_size
from toolkit.errors import UserError
from toolkit.files.durable import give_usual_mode


def capture_random_state() -> dict[str, torch.Tensor]:
    """This rank's current random state of Python, NumPy and torch (every device), as tensors on the CPU."""
    _, python_state, _ = random.getstate()
    numpy_state: Sequence[Any] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    state = {
        "python": torch.tensor(python_state, dtype=torch.int64),
        "numpy": torch.tensor([*numpy_state[1].tolist(), numpy_state[2]], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore this rank's random state on exit, even if a library draws at its import (nltk does, for ROUGE)."""
    with contextlib.ExitStack() as undo:
        undo.callback(_set, capture_random_state())
        yield


def save_random_state(state: dict[str, torch.Tensor], folder: Path) -> str:
    """Write the result of `capture_random_state`; returns the file's name."""
    name = f"rng-{rank():05d}.safetensors"
    save_file(state, folder / name)
    give_usual_mode(folder / name)
    return name


def load_random_state(folder: Path, saved_world_size: int) -> None:
    """Restore this rank's random state. On another number of ranks nothing is restored, and training reseeds itself. A rank's
    file that is missing, or not of `save_random_state`, is a `UserError` on every rank. Collective."""

    def restore() -> None:
        path = folder / f"rng-{rank():05d}.safetensors"
        try:
            _set(load_file(path))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the random state {path} cannot be restored ({reason}): resume from another checkpoint") from None

    if saved_world_size == world_size():
        on_all_ranks(restore)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, equal on every machine (blake2b of their text)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed Python, NumPy and torch (the CPU and every GPU) from `parts`.

    Training calls it before every micro-batch with (seed, step, rank, micro-batch). Dropout then depends only on the place in the
    run: a restart draws the same masks, and an evaluation in between changes nothing.
    """
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():  # `torch.manual_seed` also formats a stack for each kind of device that is not there
        torch.cuda.manual_seed_all(seed)


def _set(state: dict[str, torch.Tensor]) -> None:
    random.setstate((3, tuple(state["python"].tolist()), None))
    *keys, position = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
