"""Runs whose terminal or log ends: they print into nothing, and come to their end with checkpoint, export and report."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.faults.harness import attempt_with, resume
from tests.faults.workers.faulty_recipe import at_step
from tests.support.workbench import Workbench, step_name
from toolkit.errors import EXIT_HANG, EXIT_STOPPED


def lose(*numbers: int, how: str) -> None:
    """The file descriptors lead to a full disk, to a pipe that nobody reads any more, to a closed terminal, or are closed."""
    import pty
    import sys

    if how == "full disk":
        lost = os.open("/dev/full", os.O_WRONLY)
    elif how == "no reader":
        reader, lost = os.pipe()
        os.close(reader)
    elif how == "closed terminal":
        terminal, lost = pty.openpty()
        os.close(terminal)
        sys.stderr.isatty = lambda: True  # type: ignore[method-assign]  # it was one as the run began: bars are on it
    for number in numbers:
        if how == "closed":
            os.close(number)
            setattr(sys, {1: "stdout", 2: "stderr"}[number], None)  # as Python starts then
        else:
            os.dup2(lost, number)


def interrupt_with_its_reader(step: int) -> None:
    """Ctrl-C in `… | tee log` reaches the ranks and tee."""
    at_step(step, lambda: (lose(1, how="no reader"), os.kill(os.getpid(), signal.SIGINT)))  # type: ignore[arg-type,func-returns-value]


CASES = [("full disk", (1,)), ("closed terminal", (1, 2)), ("closed", (1, 2))]
REASONS = {"full disk": "No space left on device", "closed terminal": "Input/output error"}


@pytest.mark.parametrize(("how", "numbers"), CASES)
def test_a_run_that_cannot_print_comes_to_its_end(faulty_bench: Workbench, how: str, numbers: tuple[int, ...]) -> None:
    changes: dict[str, Any] = {"train__max_steps": 3, "eval__at_start": True}
    outcome = attempt_with(faulty_bench, how, partial(lose, *numbers, how=how), exports=True, **changes)
    assert outcome.returncodes == [0, 0], outcome.stderr[-4000:]
    assert step_name(3) in faulty_bench.checkpoints(how)
    assert (faulty_bench.runs / how / "export" / "model.safetensors").exists()
    assert (faulty_bench.runs / how / "report.html").exists()
    noted = [(line["name"], line["reason"]) for line in faulty_bench.lines(how, "lost_output")]
    assert ("stdout", REASONS[how]) in noted if how in REASONS else noted == []
    if how == "full disk":
        warning = "WARNING: stdout cannot be written (No space left on device): the run goes on without it\n"
        assert outcome.stderr.count(warning) == 1 and "Error" not in outcome.stderr


def test_ctrl_c_that_ends_the_reader_too_loses_no_step(faulty_bench: Workbench) -> None:
    outcome = attempt_with(faulty_bench, "tee", partial(interrupt_with_its_reader, 5))
    assert outcome.returncodes == [EXIT_STOPPED] * 2, outcome.stderr[-4000:]
    stands = max(faulty_bench.checkpoints("tee"))
    assert stands >= step_name(5)
    [noted] = faulty_bench.lines("tee", "lost_output")
    assert (noted["name"], noted["reason"]) == ("stdout", "Broken pipe")
    resume(faulty_bench, "tee", from_step=int(stands[-8:]))


def hang_without_a_reader() -> None:
    at_step(2, lambda: (lose(1, 2, how="no reader"), time.sleep(600)))  # type: ignore[arg-type,func-returns-value]


def test_a_hang_ends_by_its_exit_code_though_nobody_reads_why(faulty_bench: Workbench) -> None:
    outcome = attempt_with(faulty_bench, "hang", hang_without_a_reader, run__timeout_s=6)
    assert outcome.returncodes == [EXIT_HANG] * 2
    assert "no progress for 6 s" in (faulty_bench.runs / "hang" / "hang-rank-00000.txt").read_text()
