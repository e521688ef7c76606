"""A process of a run ends: it is asked to by a signal, it is killed, or its launcher goes.

Where all ranks can agree, they end with code 75 and one checkpoint; where one is lost, another names it. The same command, or
`--max_restarts`, goes on as if nothing had been.
"""

import os
import signal
import subprocess
import time
from functools import partial

import pytest

from tests.faults.harness import SCRIPT, Fault, arguments, attempt_with, check_killed, run_with, start_with
from tests.faults.refusals import on_rank
from tests.faults.workers import faulty_recipe as faulty
from tests.faults.workers.faulty_recipe import at_step, kill, this_rank, this_run
from tests.support.checkpoint_files import newest_folder
from tests.support.launch import LaunchResult, free_port
from tests.support.real_launch import accelerate_launch, finish
from tests.support.same_runs import check_same, read_manifest
from tests.support.workbench import FP32, Workbench
from toolkit.errors import EXIT_STOPPED

NUM_STEPS = 6
CHANGES = {
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
WAITED_FOR = CHANGES | {"checkpoint__async_save": False}  # no save is under way when it happens; that of step 2 stands in step 4
LOST = "error: lost {who} (killed, failed, or the machine is off): the same command goes on from the last checkpoint"


@pytest.fixture(scope="module")
def bench(bench) -> Workbench:
    """The runs of this file, with a finished run `whole` among them."""
    run_with(bench, "whole", **CHANGES)
    assert bench.checkpoints("whole") == ["step-00000003", "step-00000006"]
    return bench


# --- Signals.


def phase(phase: str, step: int, ranks: list[int], *names: str, **more) -> Fault:
    return partial(faulty.signal_in_phase, phase, step, ranks, names, **more)


# Name: fault, steps it may end after, whether it then owes an evaluation, settings.
LOADERS = {"data__num_loader_workers": 2}
MOMENTS = {
    "update": (phase("update", 2, [0, 1], "SIGHUP"), {3}, True, {}),
    "evaluation, last batch": (partial(faulty.signal_in_generation, 3, [0, 1], ["SIGUSR1"]), {5}, False, {}),
    "before a save": (phase("saving", 2, [1], "SIGQUIT"), {3}, True, {}),
    "save under way": (
        partial(on_rank, 1, "open", r"{4}.tmp/state/__1_0\.distcp w ", partial(faulty.signal_and_hold, "SIGTERM")),
        {5, 6}, False, {},
    ),
    "signals until the end": (partial(faulty.signals_until_the_end, ["SIGTERM", "SIGINT"], every_s=0.01), {0, 1, 2}, False, {}),
    # Loader workers get the signal of a terminal too.
    "loader workers": (phase("forward and backward", 1, [0, 1], "SIGINT", "SIGINT", to_group=True), {2}, False, LOADERS),
    "single": (phase("forward and backward", 1, [0], "SIGINT", nth=2), {2}, False, {"preset": "single"}),
}  # fmt: skip


def tell_finalization() -> None:
    """Say where a rank that ends early is left to Python's finalization, which threads of gloo may abort."""
    from toolkit import errors

    leave = errors._leave

    def leave_and_print(exit_code: int) -> None:
        leave(exit_code)
        print("Python finalizes", flush=True)

    errors._leave = leave_and_print


@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_run_goes_on_bit_for_bit(bench, moment):
    fault, steps, evaluation_due, settings = MOMENTS[moment]
    name, whole = moment.replace(" ", "-").replace(",", ""), "whole"
    if "preset" in settings:
        run_with(bench, whole := f"whole-{settings['preset']}", **CHANGES, **settings)
    stopped = attempt_with(bench, name, fault, tell_finalization, **CHANGES, **settings)
    assert len(stopped.returncodes) == 1 or "Python finalizes" not in stopped.stdout
    step = check_stopped(bench, name, stopped)
    assert step in steps
    if step:
        due = read_manifest(bench.checkpoint(name, step))["state"]["evaluation_due"]
        assert due == (evaluation_due or step == NUM_STEPS > min(steps))
    run_with(bench, name, **CHANGES, **settings)
    check_same(bench, name, whole, NUM_STEPS)
    assert bench.checkpoints(name) == bench.checkpoints(whole)
    for best in (3, 6):
        losses = [read_manifest(bench.checkpoint(run, best))["metrics"]["loss"] for run in (name, whole)]
        assert losses[0] == losses[1]


def check_stopped(bench: Workbench, name: str, result: LaunchResult) -> int:
    """All ranks ended as asked, said so once, and left one checkpoint of the same step; returns that step, 0 without one."""
    assert set(result.returncodes) == {EXIT_STOPPED}, f"{result.returncodes}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    for trace in ("Traceback", "KeyboardInterrupt", "Error"):
        assert trace not in result.stderr, result.stderr[-6000:]
    [said] = [line for line in result.stdout.splitlines() if line.startswith("stopped by SIG")]
    if said.endswith(" before the first step"):
        assert not (bench.runs / name / "checkpoints").exists()
        return 0
    newest, refused = newest_folder(bench.runs / name)
    assert newest is not None and refused == []
    step = int(newest.name.removeprefix("step-"))
    assert f" after step {step}, with a checkpoint" in said
    assert all(entry.startswith("step-") and "." not in entry for entry in bench.checkpoints(name)), bench.checkpoints(name)
    assert len({path.name for path in newest.glob("rng-*")}) == len(result.returncodes)
    return step


def test_evaluation_done_after_a_stop_is_logged_once_though_the_run_dies_after_it(bench):
    """The checkpoint that owes it is still the newest when the run is resumed again."""
    changes = CHANGES | {"checkpoint__keep_best": 0}
    check_stopped(bench, "died", attempt_with(bench, "died", phase("evaluation", 3, [0], "SIGTERM", nth=2), **changes))
    died = attempt_with(bench, "died", phase("forward and backward", 4, [0, 1], "SIGKILL"), **changes)
    assert died.returncodes == [-signal.SIGKILL] * 2
    assert [line["step"] for line in bench.lines("died", "eval")] == [3], "not evaluated by the run that went on"
    assert "after step 3\n" in run_with(bench, "died", **changes)
    assert [line["step"] for line in bench.lines("died", "eval")] == [3, 6]


# --- A rank is lost.


@pytest.mark.parametrize(("where", "dead"), [("forward and backward", 0), ("evaluation", 1)])
def test_rank_that_is_ended_as_its_peer_died_saves_nothing(bench, where, dead):
    """As torch elastic does it: the peer has gone, then comes the signal. Rank 0 would begin a checkpoint."""
    name = f"orphan-{dead}"
    with start_with(bench, name, phase(where, 3, [dead], "SIGSTOP", nth=2), faulty.tell_saves, **WAITED_FOR) as running:
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


@pytest.mark.parametrize("dead", [0, 1])
def test_the_survivor_of_a_killed_rank_names_it(bench, dead):
    """Without a launcher, rank 0 hosts the store."""
    name, survivor = f"killed-{dead}", 1 - dead
    outcome = attempt_with(bench, name, partial(at_step, 4, partial(kill, dead)), **WAITED_FOR)
    check_killed(outcome, [dead])
    sentence = LOST.format(who="rank 1" if dead else "rank 0 or the launcher of its machine")
    assert [line for line in outcome.stderr.splitlines() if line.startswith("error:")] == [sentence], outcome.stderr[-6000:]
    assert "Traceback" not in outcome.stderr, outcome.stderr[-6000:]
    assert "Traceback" in (bench.runs / name / f"lost-rank-{survivor:05d}.txt").read_text()


# --- `accelerate launch --max_restarts`: a broken run comes back by itself. The agent keeps one store over all attempts.


def crash_once(others_hang: bool) -> None:
    """Rank 1 is killed in step 4 of the first attempt, once the checkpoint of step 3 is there. The rank that loses its peer then
    ends, as over gloo, or hangs, as over nccl it may."""
    from toolkit import errors

    crashed = this_run() / "crashed"
    if this_rank() == 0 and crashed.exists():
        time.sleep(3)  # rank 1 comes first, and must not take what the dead rank 0 left in the store for an answer

    def crash() -> None:
        while not (this_run() / "checkpoints" / "step-00000003").exists():
            time.sleep(0.02)
        if not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def hang(exit_code: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1000)

    if this_rank() == 1:
        at_step(4, crash)
    if others_hang:
        errors._leave = hang


@pytest.mark.parametrize("num_machines", [1, 2])
def test_killed_rank_restarts_the_run_from_the_last_checkpoint(bench, num_machines):
    """On two machines, that of the hanging rank is called back by the other one, and its ranks still count no restart."""
    name, flags = f"restarted-{num_machines}", [["--max_restarts=2", "--monitor_interval=0.1"]]
    where = {}
    if num_machines == 2:
        where = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port(), "same_network": False}
        # Which of them holds the rendezvous does not follow from its address.
        own = (f"--rdzv_backend=c10d|--machine_rank={n}|--rdzv_conf=is_host={n == 0},join_timeout=120" for n in (0, 1))
        flags = [[*flags[0], *of_machine.split("|")] for of_machine in own]
    fault = partial(crash_once, num_machines == 2)
    launchers = [launch(bench, name, fault, flags=of_machine, overrides=FP32 | where) for of_machine in flags]
    printed = "".join(map(finish, launchers))
    assert [launcher.returncode for launcher in launchers] == [0] * num_machines, printed[-8000:]
    assert (bench.runs / name / "crashed").exists(), "no rank was killed"
    assert "after step 3\n" in printed, "not resumed from the checkpoint\n" + printed[-4000:]
    if num_machines == 1:  # torch elastic sends the survivor SIGTERM at once
        assert printed.splitlines().count(LOST.format(who="rank 1")) == 1 and "gloo" not in printed, printed[-8000:]
    whole, restarted = (bench.lines(run, "train") for run in ("whole", name))
    for figure in ("step", "loss", "grad_norm"):
        assert [line[figure] for line in restarted] == [line[figure] for line in whole]


# --- The launcher goes.
ENDS = {
    "terminated": ("fsdp2_cpu", partial(faulty.end_in_step, 4, signal.SIGTERM), "SIGTERM", 5),
    "what started it, killed": ("single", partial(faulty.end_in_step, 4, 0), "the end of its launcher", 5),
    "terminated as the run begins": ("single", faulty.outlive_launcher, "the end of its launcher", 2),
}
"""Preset, what ends it, what the run says of it, and after which step. A launcher that is killed is in `test_two_machines.py`."""


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_the_launcher_stops_every_rank_with_a_checkpoint(bench, end):
    """torch elastic passes signals on and would kill after 30 s; accelerate's launcher of one process passes on none."""
    (preset, fault, said, step), name = ENDS[end], f"launched-{len(end)}"
    with subprocess.Popen(["sleep", "1000"]) as caller:
        launcher = launch(bench, name, fault, preset=preset, env={"TOOLKIT_STARTED_BY": str(caller.pid)})
        printed = finish(launcher)  # until the last rank has closed its output
        caller.kill()
    assert launcher.returncode != 0 and "terminate called" not in printed, printed
    sentence = f"stopped by {said} after step {step}, with a checkpoint: the same command goes on from there\n"
    assert printed.count(sentence) == 1, printed
    assert newest_folder(bench.runs / name) == (bench.checkpoint(name, step), [])


def launch(bench: Workbench, name: str, *faults: Fault, **more) -> subprocess.Popen[str]:
    argv = arguments(bench, name, *faults, **CHANGES)
    return accelerate_launch(SCRIPT, argv, folder=bench.runs, **{"overrides": FP32, **more})
