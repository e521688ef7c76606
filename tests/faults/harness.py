"""Runs of a recipe on 2 ranks with a fault put into them from outside, and what their resume must come to.

A fault is a picklable function of no arguments that every rank calls before the recipe starts. Most faults wait for a file
operation of the process, as Python's audit events tell it *before* it is done (`before`), whatever code does it; then they kill
ranks, or raise what a file system would. What is injected is told on stderr: `Outcome.injected` holds it, and a test without it
would prove nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from tests.recipes.runs import FP32, RECIPES, Workbench
from tests.recipes.test_resume import curves, rows_by_place
from tests.support.launch import PEER_GRACE_S, Running, start
from toolkit.errors import EXIT_USER_ERROR
from toolkit.files.durable import seal

NUM_STEPS = 6
SAVED = (2, 4, 6)
CHANGES: dict[str, Any] = {
    "model__dropout": 0.1,
    "train__max_steps": NUM_STEPS,
    "train__micro_batch_size_rows": 2,  # two micro-batches a step on each of two processes
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 4,
    "eval__generate": False,
    "log_row_ids": True,
}
"""26 training rows: an epoch ends after step 4, whose batch is smaller."""
WHOLE = "whole"
"""The run that nothing interrupts."""

PATIENCE_S = 60.0
"""How long a test waits for what is to come at once."""

Fault = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended."""

    returncodes: list[int]
    stdout: str
    stderr: str
    injected: list[float]
    """When a fault struck, in seconds since the epoch."""
    end_s: float

    @property
    def seconds_after(self) -> float:
        """From the first strike to the end of the last rank."""
        return self.end_s - self.injected[0]


# --- The test's side.


def start_with(bench: Workbench, name: str, fault: Fault | None = None, *, finishes: bool = False, **changes: Any) -> Running:
    """Start run `name` with a fault in it; use it in a `with`. Unless it `finishes`, training is all it does: no export, no
    curves."""
    run = bench.runs / name
    pids_folder(run).mkdir(parents=True, exist_ok=True)
    argv = [pickle.dumps(fault).hex(), str(RECIPES / f"{bench.recipe}.py"), *bench.flags(name, **{**CHANGES, **changes})]
    return start(__file__, argv, preset="fsdp2_cpu", overrides=FP32, env={"FAULTY_RUN": str(run), "FINISHES": str(finishes)})


def attempt_with(bench: Workbench, name: str, fault: Fault | None = None, *, timeout_s: float = 120, **changes: Any) -> Outcome:
    """Run to the end, good or bad."""
    with start_with(bench, name, fault, **changes) as running:
        result = running.wait(timeout_s)
        end_s = time.time()
    injected = sorted(map(float, re.findall(r"^injected at (\S+)$", result.stderr, re.MULTILINE)))
    return Outcome(result.returncodes, result.stdout, result.stderr, injected, end_s)


def resume(bench: Workbench, name: str, from_step: int, **changes: Any) -> str:
    """Resume to a good end, from the checkpoint of that step; returns what was printed."""
    outcome = attempt_with(bench, name, **changes)
    assert not any(outcome.returncodes), outcome.stdout[-3000:] + outcome.stderr[-6000:]
    checkpoint = bench.runs / name / "checkpoints" / step_name(from_step)
    assert f"resuming from {checkpoint}, after step {from_step}\n" in outcome.stdout, outcome.stdout[-3000:]
    return outcome.stdout


def stopped_after(bench: Workbench, name: str, step: int) -> Path:
    """A new run that looks as if all its ranks had died in the step after the one given, once its checkpoint stood."""
    return shutil.copytree(bench.runs / WHOLE, bench.runs / name, ignore=lambda _, names: set(names) & later_than(step))


def later_than(step: int) -> set[str]:
    return {step_name(saved) for saved in SAVED if saved > step}


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def check_like_whole(bench: Workbench, name: str, steps: tuple[int, ...], others: tuple[str, ...] = ()) -> None:
    """Curves, rows and checkpoints of a run are those of the uninterrupted one, bit for bit, and nothing else lies about.

    Args:
        steps: of the checkpoints that the run must hold.
        others: what must lie beside them.
    """
    whole, run = bench.runs / WHOLE, bench.runs / name
    for kind, of_line in (("train", curves), ("eval", lambda line: line["loss"])):
        lines = [[of_line(line) for line in bench.lines(of, kind)] for of in (WHOLE, name)]
        assert lines[0] == lines[1]
    assert bench.checkpoints(name) == sorted([*map(step_name, steps), *others])
    for step in steps:
        assert saved_state(run, step) == saved_state(whole, step)
    assert rows_by_place(run) == rows_by_place(whole)
    for path in sorted(whole.glob("rows-*.jsonl")):
        assert (run / path.name).read_text() == path.read_text(), "a row was lost or logged twice"


def saved_state(run: Path, step: int) -> dict[str, Any]:
    """Hashes of all shards (weights and moments) and random states, by file name (DCP's index holds an id that is drawn), and
    what the manifest says of the run, but for speeds."""
    folder = run / "checkpoints" / step_name(step)
    files = [*folder.glob("state/*.distcp"), *folder.glob("rng-*.safetensors")]
    assert len(files) == 4, files
    manifest = read_manifest(folder)
    metrics = {name: value for name, value in manifest["metrics"].items() if not name.endswith("_per_s")}
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"step": manifest["step"], "state": manifest["state"], "metrics": metrics, **hashes}


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))


def whole_checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that are whole, in this module's own judgement, oldest first."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir() if is_whole(folder))


def is_whole(folder: Path) -> bool:
    if not re.fullmatch(r"step-\d+", folder.name) or not (folder / "manifest.json").exists():
        return False
    files = read_manifest(folder)["files"]
    return len(files) == 5 and all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == about["sha256"] for name, about in files.items()
    )


def check_one_sentence(outcome: Outcome, sentence: str) -> None:
    """Every rank ended by itself as by a user's error, and one of them told why; `sentence` is a regular expression."""
    assert outcome.returncodes == [EXIT_USER_ERROR] * 2, outcome.stderr[-6000:]
    assert "Traceback" not in outcome.stderr, outcome.stderr[-6000:]
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and re.fullmatch(f"error: {sentence}", errors[0]), outcome.stderr[-6000:]


def check_survivors_ended_by_themselves(outcome: Outcome) -> None:
    """Whoever was not killed failed, and was not waited for until it was terminated."""
    assert outcome.injected, "nothing was injected"
    for code in outcome.returncodes:
        assert code in (1, -signal.SIGKILL), outcome.stderr[-6000:]
    assert outcome.seconds_after < PEER_GRACE_S, f"{outcome.seconds_after:.1f} s"


# --- The rank's side.


def before(event: str, path: str, act: Callable[[], None], *, standing: str = "", times: int = 1) -> None:
    """Call `act` in place of (or before, if it returns) the next file operations of this process that fit.

    Args:
        event: name of a Python audit event: `open`, `os.mkdir`, `os.rename`, `os.remove`, `os.rmdir`, `shutil.rmtree`.
        path: regular expression that is searched for in the event's arguments, as in `FROM TO` of a rename, `PATH MODE` of an
            open. `{4}` stands for the name of the checkpoint of step 4.
        standing: the entry of the checkpoints folder that must be there for it.
        times: of so many operations.
    """
    pattern = re.compile(re.sub(r"\{(\d)\}", lambda number: step_name(int(number[1])), path))
    condition = this_run() / "checkpoints" / standing
    left = [times]

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name != event or not left[0] or not pattern.search(" ".join(map(str, args))) or not os.path.lexists(condition):
            return
        left[0] -= 1
        act()

    sys.addaudithook(hook)


def at_step(step: int, act: Callable[[], None]) -> None:
    """Call `act` in the main thread when this rank begins the first forward pass of a step."""
    from toolkit.training import loop

    seed_all = loop.seed_all

    def act_and_seed(*parts: int | str) -> None:
        if parts[0] == "step" and parts[2:] == (step, this_rank(), 0):
            act()
        seed_all(*parts)

    loop.seed_all = act_and_seed


def kill(*ranks: int) -> None:
    """SIGKILL; this rank last, if it is among them."""
    tell()
    for number in sorted(ranks, key=lambda number: number == this_rank()):
        os.kill(int((pids_folder(this_run()) / str(number)).read_text()), signal.SIGKILL)


def refuse(number: int) -> NoReturn:
    """Raise what the file system would."""
    tell()
    raise OSError(number, os.strerror(number))


def refuse_to_write() -> NoReturn:
    refuse(errno.EROFS)


def tell() -> None:
    """Say that a fault strikes now."""
    os.write(2, f"\ninjected at {time.time()}\n".encode())


def this_rank() -> int:
    return int(os.environ["RANK"])


def this_run() -> Path:
    return Path(os.environ["FAULTY_RUN"])


def pids_folder(run: Path) -> Path:
    return run.with_name(f"{run.name}.pids")


def run_recipe_with_fault(fault: str, recipe: str) -> None:
    """What each rank does."""
    from toolkit.training import setup as stages

    (pids_folder(this_run()) / str(this_rank())).write_text(str(os.getpid()))
    if inject := pickle.loads(bytes.fromhex(fault)):
        inject()
    left_out = patch.object(stages, "finish", lambda config, run: run.sharded.accelerator.end_training())
    with nullcontext() if os.environ["FINISHES"] == "True" else left_out:
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    _, inject_, recipe_, *flags = sys.argv
    sys.argv = [recipe_, *flags]
    run_recipe_with_fault(inject_, recipe_)
