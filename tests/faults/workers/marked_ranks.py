"""A recipe whose ranks tell from moment to moment where they are: `marked_ranks.py FOLDER RECIPE FLAGS`, started by soak.py.

Each rank writes into shared memory (`FOLDER/rank-<rank>`), so that what it was at last is there after a SIGKILL. Nothing else is
changed but that the disk is slow: the tiny model's shards would lie there before training has changed anything.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

MARKS = np.dtype(
    [
        ("phase", "S32"),  # of the training thread
        ("step", "i8"),
        ("first_step", "i8"),  # the first one that this process has begun; 0: none yet
        ("num_done", "i8"),  # steps done; -1: not known yet
        ("save_phase", "S32"),  # of the thread that writes; empty: no save is under way
        ("save_step", "i8"),
        ("num_saves", "i8"),  # that this process has begun to write
        ("committed", "i8"),  # newest step whose commit has returned; rank 0 only
    ]
)
DONE_IN = ("evaluation", "saving")
"""Phases of a step that has been done."""
SLOWEST_DISK_S = 0.4


def open_marks(folder: Path, rank: int, mode: Any = "r") -> np.memmap:
    """One record of `MARKS`; with mode `w+` a new one."""
    return np.memmap(folder / f"rank-{rank}", MARKS, mode, shape=(1,))


def main() -> None:
    """Run the recipe under marks."""
    folder, recipe = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    marks = open_marks(folder, int(os.environ["RANK"]), "r+")
    marks["phase"] = b"start-up"

    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.distributed.watchdog import Watchdog
    from toolkit.training import finetune, run

    at, write, commit = Watchdog.at, CheckpointWriter._write, checkpoint_writer.commit
    save_tensors, delays = checkpoint_writer.save_tensors, random.Random()  # of its own: the run's is seeded, and saved

    def marked_at(watchdog: Watchdog, phase: str, step: int | None, **how: bool) -> None:
        at(watchdog, phase, step, **how)
        if step is None:
            return
        marks["step"] = step
        marks["phase"] = phase.encode()
        marks["num_done"] = step if phase in DONE_IN else step - 1
        if phase not in DONE_IN and not marks["first_step"][0]:
            marks["first_step"] = step

    def marked_write(writer: CheckpointWriter, snapshot: Any, save: Any) -> None:
        marks["save_step"] = save.step
        marks["num_saves"] += 1
        marks["save_phase"] = b"begin"
        write(writer, snapshot, save)
        marks["save_phase"] = b""

    def marked_commit(unfinished: Path, stands: Path, manifest: dict[str, Any]) -> None:
        commit(unfinished, stands, manifest)
        marks["committed"] = manifest["step"]

    def saving(phase: bytes, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any) -> Any:
            marks["save_phase"] = phase
            result = function(*args)
            marks["save_phase"] = b"waiting for the other rank"
            return result

        return marked

    def training(phase: bytes, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any) -> Any:
            marks["phase"] = phase
            return function(*args)

        return marked

    def save_slowly(*args: Any) -> list[str]:
        time.sleep(delays.uniform(0, SLOWEST_DISK_S))
        return save_tensors(*args)

    with (
        patch.object(Watchdog, "at", marked_at),
        patch.object(CheckpointWriter, "_write", marked_write),
        patch.object(checkpoint_writer, "save_tensors", saving(b"shards", save_slowly)),
        patch.object(checkpoint_writer, "describe_files", saving(b"hashes", checkpoint_writer.describe_files)),
        patch.object(checkpoint_writer, "commit", saving(b"manifest and rename", marked_commit)),
        patch.object(checkpoint_writer, "prune", saving(b"pruning", checkpoint_writer.prune)),
        patch.object(run, "load_checkpoint", training(b"loading the checkpoint", run.load_checkpoint)),
        patch.object(finetune, "finish", training(b"export", finetune.finish)),
    ):
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
