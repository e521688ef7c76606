"""Random state of each rank as tensors in a file beside a checkpoint's shards; no pickle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.distributed import rank, world_size


def save_random_state(folder: Path) -> str:
    """This rank's random state of Python, NumPy and torch (every device), as tensors; returns the file's name."""
    import numpy as np
    from safetensors.torch import save_file

    _, python_state, _ = random.getstate()
    numpy_state: Sequence[Any] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    state = {
        "python": torch.tensor(python_state, dtype=torch.int64),
        "numpy": torch.tensor([*numpy_state[1].tolist(), numpy_state[2]], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    name = f"rng-{rank():05d}.safetensors"
    save_file(state, folder / name)
    return name


def load_random_state(folder: Path, saved_world_size: int) -> None:
    """Restore this rank's random state; on another number of ranks there is none to restore, and training reseeds itself."""
    import numpy as np
    from safetensors.torch import load_file

    if saved_world_size != world_size():
        return
    state = load_file(folder / f"rng-{rank():05d}.safetensors")
    random.setstate((3, tuple(state["python"].tolist()), None))
    *keys, position = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
