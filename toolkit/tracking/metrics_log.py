"""`metrics.jsonl`, a run's record: a JSON object per line with `kind` (`train`, `eval`, `checkpoint`, …), `step` and figures; and
`memory.json`, the peak memory of training steps."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.distributed.comm import gather_objects, on_all_ranks, rank, world_size
from toolkit.distributed.device import GIB, smallest_gpu_bytes
from toolkit.errors import UserError, refusal_named
from toolkit.files.json_lines import encode_json_line, read_json_lines, save_json_lines
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.log import lost_outputs

if TYPE_CHECKING:
    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

_AGAIN = "and run the same command again"


class MetricsLog:
    """`metrics.jsonl`, open for appending. When `write` returns, the operating system has the line.

    Only one rank writes, so a failing disk does not raise there: it sets `error`, which all ranks must then agree on. If somebody
    removes, replaces or truncates the file during the run, the next write says so and goes on in the file that is there then.
    """

    def __init__(self, path: Path, is_writer: bool, restore_folder: Callable[[], None] = lambda: None):
        """`restore_folder` makes a run folder that was removed again."""
        self.path = path
        self.error: UserError | None = None
        self._restore_folder = restore_folder
        self._noted: set[str] = set()
        self._file: Any = None
        if is_writer:
            with _usable(path):
                _keep_lines(path, lambda line: True)
                self._open()

    @property
    def is_empty(self) -> bool:
        """Whether this rank writes and the file has no lines."""
        return self._file is not None and self._num_bytes == 0

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Append one line. JSON has no NaN: a figure that is not finite is null, with `<name>_is` "nan", "inf" or "-inf"."""
        if self._file is None or self.error is not None:
            return
        line: dict[str, Any] = {"kind": kind, "step": step}
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                line |= {name: None, f"{name}_is": str(value)}
            else:
                line[name] = value
        self.note_lost_outputs(step)
        text = encode_json_line(line)
        self.reopen()
        if self.error is not None:
            return
        with self.noting_failure(self.path):
            if self._file.write(text) < len(text):  # the disk is full; the next run drops the torn line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._num_bytes += len(text)

    def note_lost_outputs(self, step: int) -> None:
        """Write a line for each standard stream of the rank that writes that has failed since the last call."""
        for name, reason in lost_outputs().items():
            if self._file is not None and name not in self._noted:
                self._noted.add(name)
                logger.warning(f"{name} cannot be written ({reason}): the run goes on without it")
                self.write("lost_output", step, name=name, reason=reason)

    def load(self) -> list[dict[str, Any]]:
        """All lines so far, on the rank that writes, without any that others wrote into the file during the run."""
        self.reopen()
        lines: list[dict[str, Any]] = []
        num_foreign = 0
        with contextlib.suppress(OSError):
            for text in filter(None, self.path.read_bytes().splitlines()):
                try:
                    line = json.loads(text)
                    is_ours = isinstance(line, dict) and {"kind", "step"} <= line.keys()
                except (ValueError, RecursionError):
                    is_ours = False
                lines += [line] if is_ours else []
                num_foreign += not is_ours
        if num_foreign:
            logger.warning(f"{num_foreign} lines of {self.path} were changed or added during the run and are left out")
        return lines

    def reopen(self) -> None:
        """Check with one `stat` that the file is unchanged; else open the one that is there now, or a new one, and say so."""
        if self._file is None or self.error is not None:
            return
        with self.noting_failure(self.path):
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(self.path)
                if os.path.samestat(there, self._opened) and there.st_size >= self._num_bytes:
                    return
            self._restore_folder()
            with contextlib.suppress(OSError):  # removed on another node of a network file system
                self._file.close()
            self._open()
            if self._num_bytes:  # its last line may be torn
                self._num_bytes += self._file.write(b"\n")
            logger.warning(f"{self.path} was removed or changed during the run: figures that it no longer has are lost")

    @contextlib.contextmanager
    def noting_failure(self, path: Path) -> Iterator[None]:
        """Remember, on any rank, that a file of figures cannot be written; the first failure counts."""
        try:
            with refusal_named(f"{path} cannot be written", f"fix that, {_AGAIN}"):
                yield
        except UserError as error:
            self.error = self.error or error

    def sync(self) -> None:
        """Fsync all lines so far, so that they survive a power failure, as a checkpoint does."""
        self.reopen()
        if self._file is not None and self.error is None:
            with self.noting_failure(self.path):
                os.fsync(self._file.fileno())

    def truncate_after(self, step: int, *, evaluation_due: bool = False) -> None:
        """Drop the lines after `step`, here and in every rank's `rows-<rank>.jsonl`, because a resumed run writes them again.

        Each file is replaced atomically. A file that cannot be read or written, or a broken line, is a `UserError` on every rank.
        Collective: no rank continues before the files are done. With `evaluation_due`, the resumed run begins with the evaluation
        at `step`, and a line of an earlier one is dropped too.
        """

        def stays(line: dict[str, Any]) -> bool:
            return line["step"] < step or (line["step"] == step and not (evaluation_due and line.get("kind") == "eval"))

        def truncate() -> None:
            if self._file is not None:
                self.reopen()
                if self.error is not None:
                    raise self.error
                self._file.close()
                for path in (self.path, *self.path.parent.glob("rows-*.jsonl")):
                    with _usable(path):
                        _keep_lines(path, stays)
                with _usable(self.path):
                    self._open()

        on_all_ranks(truncate)

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        self._opened = os.fstat(self._file.fileno())
        self._num_bytes = self._opened.st_size


def _usable(path: Path) -> contextlib.AbstractContextManager[None]:
    return refusal_named(f"{path} cannot be used", f"fix that, {_AGAIN}")


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file atomically with only its complete, wanted lines, if it has others."""
    if not path.exists():
        return
    lines = read_json_lines(path, remedy=f"correct or remove the line, {_AGAIN}", skip_torn_end=True)
    kept = [figures for _, figures in lines if wanted(figures)]
    if b"".join(map(encode_json_line, kept)) != path.read_bytes():
        save_json_lines(path, kept)


MEMORY_FILE, ACCELERATE_FILE = "memory.json", "accelerate.yaml"


class StepMemory:
    """The peak memory of this rank's training steps so far, and the shape of its largest micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_gib = 0.0
        self.num_rows = self.num_tokens = 0
        self.row_tokens: dict[str, int] = {}

    def restart(self) -> None:
        """Reset the peak, so that memory outside of steps does not count. Where the system does not allow that, it remains."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # man proc: resets the peak resident size

    def read(self) -> float:
        """Peak GiB of this process since `restart`: allocated on a CUDA device, resident on a CPU."""
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.peak_gib = max(self.peak_gib, peak_bytes / GIB)
        return peak_bytes / GIB

    def record_batch(self, objective: Objective, batch: dict[str, torch.Tensor], num_packs: int) -> None:
        """Record the shape of a micro-batch. Its packs may share one row of the tensors (`CausalCollator.one_row`)."""
        sides = zip(objective.limits, objective.inputs, strict=True)
        row_tokens = {side: math.ceil(batch[name].numel() / num_packs) for side, name in sides}
        if (num_tokens := num_packs * sum(row_tokens.values())) > self.num_tokens:
            self.num_rows, self.row_tokens, self.num_tokens = num_packs, row_tokens, num_tokens


def save_memory(folder: Path, memory: StepMemory, metrics: MetricsLog) -> None:
    """Write the ranks' peak memory and the accelerate YAML into the run folder, and print the peak of GPUs. Collective.

    On a CPU the peak is mostly the libraries', so it says little about the run and is not printed.
    """
    ranks = gather_objects((memory.peak_gib, memory.num_tokens, memory.num_rows, memory.row_tokens))
    gpu_bytes = smallest_gpu_bytes(memory.device)
    peaks = [entry[0] for entry in ranks]
    if rank() != 0 or not any(peaks):  # no step was taken
        return
    _, _, num_rows, row_tokens = max(ranks, key=lambda entry: entry[1])
    found: dict[str, Any] = {"device": memory.device.type, "gpu_gib": gpu_bytes / GIB if gpu_bytes else None}
    found |= {"num_processes": world_size(), "peak_gib": peaks, "micro_batch_size_rows": num_rows, "row_tokens": row_tokens}
    launched_with = find_accelerate_yaml()
    metrics.reopen()  # and the run folder, if it has been removed
    with metrics.noting_failure(folder / MEMORY_FILE):
        (folder / MEMORY_FILE).write_text(json.dumps(found, indent=2) + "\n")
        if launched_with is not None:
            (folder / ACCELERATE_FILE).write_text(launched_with.read_text(encoding="utf-8"), encoding="utf-8")
    if gpu_bytes:
        command = f"`python -m toolkit report --text {folder}` compares it with the memory plan"
        logger.info(f"memory of training steps: {max(peaks):.2f} GiB on the rank with most; {command}")
