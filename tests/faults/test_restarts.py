"""`accelerate launch --max_restarts`: a broken run comes back by itself from its last checkpoint, or ends with its cause.

By the real launcher, whose agent keeps one store over all attempts; the crash comes from a script around the recipe.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import FP32, RECIPE, Workbench, new_bench

CHANGES: dict[str, Any] = {
    "train__max_steps": 6,
    "checkpoint__every_steps": 2,
    "eval__generate": False,
}
SAVED_STEP, CRASH_STEP = 2, 4

CRASHING_RECIPE = f"""
import os, runpy, signal, sys, time
from pathlib import Path

from toolkit import errors
from toolkit.distributed import rng

how, run_folder, *sys.argv[1:] = sys.argv[1:]
run_folder = Path(run_folder)
seed_all = rng.seed_all


def crash_or_seed(purpose, *parts):
    if purpose == "step" and parts[1:3] == ({CRASH_STEP}, 1):
        while not (run_folder / "checkpoints" / "step-{SAVED_STEP:08d}").exists():
            time.sleep(0.02)
        if how == "always":
            raise RuntimeError("the injected crash")
        if not (run_folder / "crashed").exists():
            (run_folder / "crashed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    seed_all(purpose, *parts)


if os.environ["RANK"] == "0" and (run_folder / "crashed").exists():
    time.sleep(3)  # rank 1 comes first, and must not take what the dead rank 0 left in the store for an answer
rng.seed_all = crash_or_seed


def hang(exit_code):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1000)


if how == "once, the other rank hangs":
    errors._leave = hang
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""
"""Rank 1 crashes in step 4, once the checkpoint of step 2 is there: killed in the first attempt, or by an error in every attempt.
The rank that loses its peer then ends, as over gloo, or hangs, as over nccl it may."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A bench with a finished run `whole` on it, which nothing interrupted."""
    bench = new_bench(tmp_path_factory, "restarts")
    (bench.runs / "crashing.py").write_text(CRASHING_RECIPE)
    bench.run("whole", **CHANGES)
    return bench


def test_killed_rank_restarts_the_run_from_the_last_checkpoint(bench: Workbench) -> None:
    with launch(bench, "killed", how="once", max_restarts=2) as launcher:
        printed = finish(launcher)
    assert launcher.returncode == 0, printed[-4000:]
    check_came_back(bench, "killed", printed)


def test_crash_in_every_attempt_ends_with_its_cause(bench: Workbench) -> None:
    with launch(bench, "hopeless", how="always", max_restarts=1) as launcher:
        printed = finish(launcher)
    assert launcher.returncode != 0
    assert printed.count("RuntimeError: the injected crash") == 2, "not one first attempt and one restart\n" + printed[-4000:]
    root_cause = printed.split("Root Cause (first observed failure)")[-1]
    assert "(local_rank: 1)" in root_cause, printed[-4000:]
    assert f"after step {SAVED_STEP}\n" in printed, "the restart did not take the checkpoint\n" + printed[-4000:]
    assert [line["step"] for line in bench.lines("hopeless", "train")] == list(range(1, CRASH_STEP))


def test_two_machines_meet_again_though_only_one_counts_the_restart(bench: Workbench) -> None:
    """The machine of the hanging rank is called back by the other one, and its ranks still count no restart."""
    where = {
        "num_machines": 2,
        "main_process_ip": "127.0.0.1",
        "main_process_port": free_port(),
        "same_network": False,
    }
    how = "once, the other rank hangs"
    with (
        launch(bench, "machines", *machine(0), how=how, max_restarts=1, **where) as first,
        launch(bench, "machines", *machine(1), how=how, max_restarts=1, **where) as second,
    ):
        printed = [finish(launcher) for launcher in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n\n".join(text[-4000:] for text in printed)
    check_came_back(bench, "machines", "".join(printed))


def launch(bench: Workbench, name: str, *flags: str, how: str, max_restarts: int, **where: Any) -> subprocess.Popen[str]:
    """Start run `name` by `accelerate launch` in fp32; `where` changes its YAML."""
    flags = (*flags, "--max_restarts", str(max_restarts), "--monitor_interval", "0.1")
    argv = [how, bench.runs / name, *bench.flags(name, **CHANGES)]
    return accelerate_launch(bench.runs / "crashing.py", argv, folder=bench.runs, overrides=FP32 | where, flags=flags)


def machine(number: int) -> tuple[str, ...]:
    """Flags of machine `number` of two that are one: which of them holds the rendezvous does not follow from its address."""
    return f"--machine_rank={number}", "--rdzv_backend=c10d", f"--rdzv_conf=is_host={number == 0},join_timeout=120"


def check_came_back(bench: Workbench, name: str, printed: str) -> None:
    """The crash happened, the second attempt took the checkpoint, and the curve is that of the uninterrupted run."""
    assert (bench.runs / name / "crashed").exists(), "no rank was killed"
    assert f"after step {SAVED_STEP}\n" in printed, "not resumed from the checkpoint\n" + printed[-4000:]
    whole, restarted = (bench.lines(run, "train") for run in ("whole", name))
    assert [line["step"] for line in restarted] == list(range(1, CHANGES["train__max_steps"] + 1))
    for figure in ("loss", "grad_norm"):
        assert [line[figure] for line in restarted] == [line[figure] for line in whole]
