"""Runs of a recipe with faults put into them from outside, and what their resume must come to.

A fault is a picklable function of no arguments that every rank calls before the recipe starts. `workers/faulty_recipe.py` has
what faults are made of. What strikes says so on stderr: `num_strikes` counts it, and a test without it would prove nothing.
"""

import hashlib
import pickle
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from tests.faults.workers import faulty_recipe
from tests.support.checkpoint_files import change_manifest
from tests.support.launch import LaunchResult, Running, start
from tests.support.rank import PAGES
from tests.support.same_runs import check_same, read_manifest
from tests.support.workbench import FP32, Workbench, step_name
from toolkit.tools import forks

SCRIPT = faulty_recipe.__file__
PATIENCE_S = 300.0
"""How long a test waits for what is to come at once."""

Fault = Callable[[], None]


def start_with(bench: Workbench, name: str, *faults: Fault, exports: bool = False, **changes) -> Running:
    """Start run `name` with faults in it; use it in a `with`. Training is all it does, unless it `exports`. `changes` also say
    where, as `start` takes it."""
    where = {key: changes.pop(key) for key in ("preset", "overrides", "num_processes") if key in changes}
    argv = arguments(bench, name, *faults, exports=exports, **changes)
    return start(SCRIPT, argv, env=PAGES if exports else None, **{"preset": "fsdp2_cpu", "overrides": FP32} | where)


def arguments(bench: Workbench, name: str, *faults: Fault, exports: bool = False, **changes) -> list[str]:
    """Of `SCRIPT`, as every rank gets them."""
    every = [*faults, *([] if exports else [faulty_recipe.no_export])]
    return [pickle.dumps(every).hex(), bench.recipe, *bench.flags(name, **changes)]


def attempt_with(bench: Workbench, name: str, *faults: Fault, timeout_s: float = 2 * PATIENCE_S, **changes) -> LaunchResult:
    """Run to the end, good or bad. Nobody ends a rank whose peer has gone: it does so itself, however slow the machine is."""
    with patch.object(forks, "PEER_GRACE_S", PATIENCE_S), start_with(bench, name, *faults, **changes) as running:
        return running.wait(timeout_s)


def num_strikes(outcome: LaunchResult) -> int:
    """How often a fault struck."""
    return outcome.stderr.splitlines().count(faulty_recipe.STRIKES)


def run_with(bench: Workbench, name: str, *faults: Fault, **changes) -> str:
    outcome = attempt_with(bench, name, *faults, **changes)
    assert not any(outcome.returncodes), outcome.stdout[-3000:] + outcome.stderr[-6000:]
    return outcome.stdout + outcome.stderr


def resume(bench: Workbench, name: str, from_step: int, **changes) -> str:
    """Resume to a good end, from the checkpoint of that step; returns what was printed."""
    printed = run_with(bench, name, **changes)
    assert f"resuming from {bench.checkpoint(name, from_step)}, after step {from_step}\n" in printed, printed[-3000:]
    return printed


# --- Checkpoints.


def make_the_manifest_match(folder: Path) -> None:
    """Let it say of the files what they are now, and nothing of those that are not there; as who changed them may."""
    contents = {name: (folder / name).read_bytes() for name in read_manifest(folder)["files"] if (folder / name).exists()}
    files = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    change_manifest(folder, lambda manifest: manifest.update(files=files))


def complete_checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that are whole, in this module's own judgement, oldest first."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir() if is_whole(folder))


def is_whole(folder: Path) -> bool:
    if not re.fullmatch(r"step-\d+", folder.name) or not (folder / "manifest.json").exists():
        return False
    files = read_manifest(folder)["files"]
    return len(files) == 5 and all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == about["sha256"] for name, about in files.items()
    )


# --- Runs on `faulty_bench`, which has a finished one on it.

WHOLE = "whole"
"""The run that nothing interrupts."""
NUM_STEPS = 6
SAVED = (2, 4, 6)
TRAINED = {
    "model__dropout": 0.1,
    "train__max_steps": NUM_STEPS,
    "train__micro_batch_size_rows": 2,  # two micro-batches a step on each of two processes
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 9,
    "eval__generate": False,
    "log_row_ids": True,
}
CHANGES = TRAINED | {"eval__every_steps": 4}
"""26 training rows: an epoch ends after step 4, whose batch is smaller."""


def stopped_after(bench: Workbench, name: str, step: int) -> Path:
    """A new run that looks as if all its ranks had died in the step after the one given, once its checkpoint stood."""
    later = [step_name(saved) for saved in SAVED if saved > step]
    return shutil.copytree(bench.runs / WHOLE, bench.runs / name, ignore=shutil.ignore_patterns(*later))


def check_like_whole(bench: Workbench, name: str, steps: tuple[int, ...], others: tuple[str, ...] = ()) -> None:
    """A run is the uninterrupted one, bit for bit, with checkpoints of these steps, and nothing lies beside them but `others`."""
    check_same(bench, name, WHOLE, *steps)
    assert bench.checkpoints(name) == sorted([*map(step_name, steps), *others])


def check_killed(outcome: LaunchResult, ranks: Sequence[int]) -> None:
    """These were, and whoever was not failed by itself, and was not waited for until it was terminated."""
    assert num_strikes(outcome), "nothing was injected"
    codes = [-signal.SIGKILL if rank in ranks else 1 for rank in (0, 1)]
    assert outcome.returncodes == codes, outcome.stderr[-6000:]
