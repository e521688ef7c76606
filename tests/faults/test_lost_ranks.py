"""A rank is killed: another one says in one sentence which, and how the run goes on; torch's traceback is in the run folder."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from tests.faults import harness
from tests.faults.harness import SCRIPT, arguments, attempt_with, check_survivors_ended_by_themselves, run_with
from tests.faults.workers.faulty_recipe import at_step, kill
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import FP32, Workbench, new_bench

CHANGES = harness.CHANGES | {"checkpoint__async_save": False}  # that of step 2 stands in step 4
SENTENCE = "error: lost {who} (killed, failed, or the machine is off): the same command goes on from the last checkpoint"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return new_bench(tmp_path_factory, "lost-ranks")


@pytest.mark.parametrize("dead", [0, 1])
def test_the_survivor_of_a_killed_rank_names_it(bench: Workbench, dead: int) -> None:
    """Without a launcher, rank 0 hosts the store."""
    name, survivor = f"killed-{dead}", 1 - dead
    outcome = attempt_with(bench, name, partial(at_step, 4, partial(kill, dead)), **CHANGES)
    assert (outcome.returncodes[dead], outcome.returncodes[survivor]) == (-signal.SIGKILL, 1)
    check_survivors_ended_by_themselves(outcome)
    who = "rank 1" if dead else "rank 0 or the launcher of its machine"
    sentence = SENTENCE.format(who=who)
    assert [line for line in outcome.stderr.splitlines() if line.startswith("error:")] == [sentence], outcome.stderr[-6000:]
    assert "Traceback" not in outcome.stderr, outcome.stderr[-6000:]
    assert "Traceback" in (bench.runs / name / f"lost-rank-{survivor:05d}.txt").read_text()
    assert "after step 2\n" in run_with(bench, name, **CHANGES)


def test_a_killed_rank_is_named_under_the_real_launcher(bench: Workbench) -> None:
    """torch elastic sends the survivor SIGTERM at once."""
    argv = arguments(bench, "launched", partial(at_step, 4, partial(kill, 0)), **CHANGES)
    launcher = accelerate_launch(SCRIPT, argv, folder=bench.runs, overrides=FP32)
    printed = finish(launcher)
    assert launcher.returncode == 1
    sentence = SENTENCE.format(who="rank 0")
    assert printed.splitlines().count(sentence) == 1, printed
    assert printed.count("Traceback (most recent call last)") == 1 and "gloo" not in printed, printed
