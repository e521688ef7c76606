"""Signals at any moment of a run: all ranks end with code 75 and one checkpoint, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    PATIENCE_S,
    SCRIPT,
    Fault,
    arguments,
    attempt_with,
    check_same,
    read_manifest,
    run_with,
    start_with,
)
from tests.faults.signals import (
    signal_in_generation,
    signal_in_phase,
    signal_in_save,
    signals_until_the_end,
    tell_saves,
    wait_for_signal,
)
from tests.faults.workers.faulty_recipe import wrap
from tests.support.checkpoint_files import newest_folder
from tests.support.launch import LaunchResult
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import FP32, Workbench, new_bench
from toolkit.errors import EXIT_STOPPED

NUM_STEPS = 6
CHANGES: dict[str, Any] = {
    "model__dropout": 0.1,
    "train__max_steps": NUM_STEPS,
    "train__micro_batch_size_rows": 2,
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 1,
    "checkpoint__keep_best": 2,
    "eval__every_steps": 3,
    "eval__num_rows": 6,
    "eval__batch_size_rows": 1,
    "log_row_ids": True,
}
"""Two micro-batches a step on each of two processes, and three batches an evaluation for the loss and three for the texts.
Evaluated after the steps 3 and 6, whose checkpoints are kept as the best two; saved after every second step."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The runs of this file, with a finished run `whole` among them."""
    bench = new_bench(tmp_path_factory, "signals")
    run_with(bench, "whole", **CHANGES)
    assert bench.checkpoints("whole") == ["step-00000003", "step-00000006"]
    return bench


def phase(phase: str, step: int, ranks: list[int], *signals: str, **more: Any) -> Fault:
    return partial(signal_in_phase, phase, step, ranks, signals, **more)


def in_generation(call: int, ranks: list[int], *signals: str) -> Fault:
    """Each rank generates three times an evaluation."""
    return partial(signal_in_generation, call, ranks, signals)


def in_save(step: int, ranks: list[int], *signals: str) -> Fault:
    return partial(signal_in_save, step, ranks, signals)


# Name: fault, steps it may end after, whether it then owes an evaluation.
MOMENTS: dict[str, tuple[Fault, set[int], bool]] = {
    "loading rows": (phase("loading rows", 1, [1], "SIGTERM"), {2}, False),
    "between two micro-batches": (phase("forward and backward", 1, [1], "SIGINT", nth=2), {2}, False),
    "update": (phase("update", 2, [0, 1], "SIGTERM"), {3}, True),
    "evaluation, loss": (phase("evaluation", 3, [1], "SIGTERM", nth=2), {3}, True),
    "evaluation, texts": (in_generation(1, [0], "SIGINT"), {3}, True),
    "evaluation, last batch": (in_generation(3, [0, 1], "SIGUSR1"), {5}, False),
    "before a save": (phase("saving", 2, [1], "SIGTERM"), {3}, True),
    "save under way": (in_save(4, [1], "SIGTERM"), {5, 6}, False),
    "last step": (phase("loading rows", 6, [0], "SIGTERM"), {6}, True),
    "last save": (in_save(6, [0], "SIGTERM"), {6}, False),
    "other signals behind it": (phase("forward and backward", 1, [0, 1], "SIGTERM", "SIGINT", "SIGUSR1", "SIGTERM"), {2}, False),
    "signals until the end": (partial(signals_until_the_end, ["SIGTERM", "SIGINT"], every_s=0.01), {0, 1, 2}, False),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_run_goes_on_bit_for_bit(bench: Workbench, moment: str) -> None:
    fault, steps, evaluation_due = MOMENTS[moment]
    name = moment.replace(" ", "-").replace(",", "")
    step = check_stopped(bench, name, attempt_with(bench, name, fault, **CHANGES))
    assert step in steps
    if step:
        due = read_manifest(bench.checkpoint(name, step))["state"]["evaluation_due"]
        assert due == (evaluation_due or step == NUM_STEPS > min(steps))
    run_with(bench, name, **CHANGES)
    check_same(bench, name, "whole", NUM_STEPS)
    assert bench.checkpoints(name) == bench.checkpoints("whole")
    for best in (3, 6):
        losses = [read_manifest(bench.checkpoint(run, best))["metrics"]["loss"] for run in (name, "whole")]
        assert losses[0] == losses[1]


def check_stopped(bench: Workbench, name: str, result: LaunchResult) -> int:
    """All ranks ended as asked, said so once, and left one checkpoint of the same step; returns that step, 0 without one."""
    assert set(result.returncodes) == {EXIT_STOPPED}, f"{result.returncodes}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    for trace in ("Traceback", "KeyboardInterrupt", "Error"):
        assert trace not in result.stderr, result.stderr[-6000:]
    said = [line for line in result.stdout.splitlines() if line.startswith("stopped by SIG")]
    assert len(said) == 1, result.stdout[-3000:]
    if said[0].endswith(" before the first step"):
        assert not (bench.runs / name / "checkpoints").exists()
        return 0
    newest, refused = newest_folder(bench.runs / name)
    assert newest is not None and refused == []
    step = int(newest.name.removeprefix("step-"))
    assert f" after step {step}, with a checkpoint" in said[0]
    assert all(entry.startswith("step-") and "." not in entry for entry in bench.checkpoints(name)), bench.checkpoints(name)
    assert len({path.name for path in newest.glob("rng-*")}) == len(result.returncodes)
    return step


# The same alone, and with loader workers, who get the signal of a terminal too.
VARIANTS: dict[str, tuple[Fault, dict[str, Any]]] = {
    "single, step": (phase("forward and backward", 1, [0], "SIGINT", nth=2), {"preset": "single"}),
    "single, save": (in_save(2, [0], "SIGUSR1"), {"preset": "single"}),
    "loader workers": (
        phase("forward and backward", 2, [0, 1], "SIGINT", "SIGINT", to_group=True),
        {"data__num_loader_workers": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_alone_and_with_loader_workers(bench: Workbench, variant: str) -> None:
    fault, settings = VARIANTS[variant]
    name = variant.replace(" ", "-").replace(",", "")
    whole = "whole"
    if "preset" in settings:
        whole = f"whole-{settings['preset']}"
        if not (bench.runs / whole).exists():
            run_with(bench, whole, **CHANGES, **settings)
    check_stopped(bench, name, attempt_with(bench, name, fault, **CHANGES, **settings))
    run_with(bench, name, **CHANGES, **settings)
    check_same(bench, name, whole, NUM_STEPS)


def test_evaluation_done_after_a_stop_is_logged_once_though_the_run_dies_after_it(bench: Workbench) -> None:
    """The checkpoint that owes it is still the newest when the run is resumed again."""
    changes = CHANGES | {"checkpoint__keep_best": 0}
    check_stopped(bench, "died", attempt_with(bench, "died", phase("evaluation", 3, [0], "SIGTERM", nth=2), **changes))
    died = attempt_with(bench, "died", phase("forward and backward", 4, [0, 1], "SIGKILL"), **changes)
    assert died.returncodes == [-signal.SIGKILL] * 2
    assert [line["step"] for line in bench.lines("died", "eval")] == [3], "not evaluated by the run that went on"
    assert "after step 3\n" in run_with(bench, "died", **changes)
    assert [line["step"] for line in bench.lines("died", "eval")] == [3, 6]


@pytest.mark.parametrize(("where", "dead"), [("forward and backward", 0), ("forward and backward", 1), ("evaluation", 1)])
def test_rank_that_is_ended_as_its_peer_died_saves_nothing(bench: Workbench, where: str, dead: int) -> None:
    """As torch elastic does it: the peer has gone, then comes the signal. Rank 0 would begin a checkpoint."""
    name = f"orphan-{where.split()[0]}-{dead}"
    changes = CHANGES | {"checkpoint__async_save": False}  # none is under way when it happens
    faults: list[Fault] = [phase(where, 3, [dead], "SIGSTOP", nth=2), tell_saves]
    with start_with(bench, name, *faults, **changes) as running:
        running.wait_for_output("got SIGSTOP")
        before = bench.checkpoints(name)
        os.kill(running.pids[dead], signal.SIGKILL)
        os.kill(running.pids[1 - dead], signal.SIGTERM)
        result = running.wait()
    assert result.returncodes[dead] == -signal.SIGKILL
    assert result.returncodes[1 - dead] not in (0, EXIT_STOPPED), result.returncodes
    assert "stopped by" not in result.stdout
    assert result.stdout.count("saving step ") == result.stdout.count("saving step 2\n") == 2, "tried to save"
    assert bench.checkpoints(name) == before == ["step-00000002"]


ENDS: dict[str, tuple[str, int, str]] = {
    "terminated": ("fsdp2_cpu", signal.SIGTERM, "SIGTERM"),
    "its terminal closed": ("fsdp2_cpu", signal.SIGHUP, "SIGHUP"),
    "killed": ("fsdp2_cpu", signal.SIGKILL, "the end of its launcher"),
    "of one process, terminated": ("single", signal.SIGTERM, "the end of its launcher"),
    "what started it, killed": ("single", 0, "the end of its launcher"),
}
"""Preset, signal to `accelerate launch`, and what the run says of it. 0: the process dies that `TOOLKIT_STARTED_BY` names, as
`compare` does."""


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_the_launcher_stops_every_rank_with_a_checkpoint(bench: Workbench, tmp_path: Path, end: str) -> None:
    """torch elastic passes signals on and would kill after 30 s; accelerate's launcher of one process passes on none."""
    (preset, number, said), name = ENDS[end], f"launched-{len(end)}"
    with subprocess.Popen(["sleep", "1000"]) as caller:
        fault = partial(wait_for_signal, 4, str(tmp_path / "waits"))
        launcher = launch(bench, name, preset, fault, env={"TOOLKIT_STARTED_BY": str(caller.pid)})
        give_up_at, num_ranks = time.monotonic() + PATIENCE_S, 1 if preset == "single" else 2
        while len(list(tmp_path.glob("waits-*"))) < num_ranks:
            assert launcher.poll() is None and time.monotonic() < give_up_at, finish(launcher)
            time.sleep(0.05)
        launcher.send_signal(number)
        if not number:
            caller.kill()
        printed = finish(launcher)  # until the last rank has closed its output
        caller.kill()
    assert launcher.returncode != 0 and "terminate called" not in printed, printed
    sentence = f"stopped by {said} after step 5, with a checkpoint: the same command goes on from there\n"
    assert printed.count(sentence) == 1, printed
    newest, refused = newest_folder(bench.runs / name)
    assert (newest, refused) == (bench.runs / name / "checkpoints" / "step-00000005", [])


def outlive_launcher() -> None:
    """It is terminated before the ranks of a run meet, after the seconds in which libraries are imported."""
    from toolkit.launch import accelerator

    def end() -> None:
        launcher = os.getppid()
        os.kill(launcher, signal.SIGTERM)
        while os.getppid() == launcher:
            time.sleep(0.02)

    wrap(accelerator, "read_launch", end)


def test_a_run_whose_launcher_ends_as_it_begins_stops_too(bench: Workbench) -> None:
    printed = finish(launch(bench, "early", "single", outlive_launcher))
    assert "stopped by the end of its launcher after step 2, with a checkpoint: " in printed, printed


def launch(bench: Workbench, name: str, preset: str, *faults: Fault, **more: Any) -> subprocess.Popen[str]:
    """Run `name` by `accelerate launch` in fp32."""
    argv = arguments(bench, name, *faults, **CHANGES)
    return accelerate_launch(SCRIPT, argv, folder=bench.runs, preset=preset, overrides=FP32, **more)
