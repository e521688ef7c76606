"""A run that hangs ends: every rank shows its stacks and exits with code 124, and the one that did not arrive is named."""

import hashlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest

from tests.faults.harness import SCRIPT, Fault, arguments, run_with, start_with
from tests.faults.workers.faulty_recipe import in_phase, this_rank, wrap
from tests.support.launch import LaunchResult
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import Workbench
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint import save as checkpoint_writer
from toolkit.data.tokens import prepare
from toolkit.distributed.rank_status import hang_file
from toolkit.errors import EXIT_HANG
from toolkit.export.model_files import ModelFiles
from toolkit.tools import forks
from toolkit.training import setup

TIMEOUT_S = 4
"""Of the watchdog."""
BUSY_S = 1.5 * TIMEOUT_S
"""How long what moves goes on."""
STEP = 3
END_S = 600.0
"""Until when a run must have ended."""
NO_PROGRESS = f"error: no progress for {TIMEOUT_S} s (run.timeout_s): "

PLACES = {
    "connecting the devices": (setup, "connect_devices"),  # which rank 1 never calls
    "tokenizing": (prepare, "tokenize_rows"),  # on rank 0 alone
    "after tokenizing": (prepare, "on_all_ranks"),  # where rank 1 has nothing to tokenize
    "loading the checkpoint": (checkpoint, "load_tensors"),
    "saving": (checkpoint_writer, "describe_files"),  # in the thread that writes the first checkpoint
    "export": (ModelFiles, "add"),  # on rank 0 alone, between two gathers
}


def sleep() -> None:
    time.sleep(END_S)


def stop() -> None:
    time.sleep(1)  # time enough to have reported its place
    os.kill(os.getpid(), signal.SIGSTOP)


def suspend() -> None:
    """As a scheduler does, for longer than the watchdog's patience."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def compute() -> None:
    end_s = time.monotonic() + BUSY_S
    while time.monotonic() < end_s:
        hashlib.sha256(bytes(2**22))


def write_slowly() -> None:
    """As on a slow file system: hardly any CPU time."""
    end_s = time.monotonic() + BUSY_S
    with tempfile.TemporaryFile(buffering=0) as file:
        while time.monotonic() < end_s:
            file.write(bytes(2**15))
            time.sleep(0.2)


def hold(place: str, who: int, way: Callable[[], None]) -> None:
    """One rank is held up, once: at one of `PLACES`, or before a phase of `STEP`."""
    calls: list[bool] = []

    def hold_once(*_, **__) -> None:
        if not calls:
            calls.append(True)
            way()

    if this_rank() == who and place in PLACES:
        wrap(*PLACES[place], hold_once)
    elif this_rank() == who:
        in_phase(place, STEP, hold_once)


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def bench(bench) -> Workbench:
    often = {"eval__every_steps": 3, "checkpoint__every_steps": 3}
    return replace(bench, changes={"train__max_steps": 5, "run__timeout_s": TIMEOUT_S, **often})


def attempt(bench: Workbench, name: str, *faults: Fault, **changes) -> LaunchResult:
    """How a run ends whose ranks are held up; one that is still stopped when the others have ended is killed."""
    with patch.object(forks, "TERM_TO_KILL_S", 1), start_with(bench, name, *faults, exports=True, **changes) as running:
        return running.wait(END_S)


def test_every_rank_shows_its_stacks_under_the_real_launcher(bench):
    """It ends the other ranks a tenth of a second after one has ended."""
    argv = arguments(bench, "launched", partial(hold, "forward and backward", 1, sleep))
    launcher = accelerate_launch(SCRIPT, argv, folder=bench.runs, preset="ddp_cpu")
    printed = finish(launcher)
    assert launcher.returncode != 0
    assert f"exitcode  : {EXIT_HANG}" in printed, printed[-3000:]
    # Of each rank, in one write; it may stand within a line of the other rank's stacks, which are written in pieces.
    assert printed.count(f"{NO_PROGRESS}rank 1 did not arrive: in step {STEP}") == 2, printed[-3000:]
    assert all("most recent call first" in hang_file(bench.runs / "launched", rank).read_text() for rank in range(2))


def test_long_work_that_moves_is_never_ended(bench):
    """The ranks wait for much longer than the patience, while rank 0 computes and, later, writes slowly."""
    ways = {"tokenizing": compute, "saving": compute, "export": write_slowly}
    faults = [partial(hold, place, 0, way) for place, way in ways.items()]
    result = attempt(bench, "slow", *faults, data__cache_dir=bench.runs / "slow cache")
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    assert (bench.runs / "slow/export/config.json").exists() and list(bench.runs.glob("slow/hang-rank-*")) == []


IN_SLEEP = ", for … s, at test_hangs.py:… in sleep"
SLEEPS = {
    "saving": (1, "step 5, saving, for … s, at …"),  # the thread that writes sleeps while training goes on, up to the last save
    "tokenizing": (0, f"tokenizing{IN_SLEEP}"),
    "loading the checkpoint": (1, f"loading the checkpoint{IN_SLEEP}"),
    "export": (0, f"export{IN_SLEEP}"),
}
"""By where a rank sleeps: which one, and what is said of it, where `…` stands for anything."""


@pytest.mark.parametrize("place", SLEEPS)
def test_a_rank_that_sleeps_is_named_with_its_place(place, bench):
    (rank, where), name = SLEEPS[place], place.replace(" ", "_")
    changes = {"data__cache_dir": bench.runs / f"{name} cache"} if place == "tokenizing" else {}  # not done yet
    if place == "loading the checkpoint":
        run_with(bench, name)
    result = attempt(bench, name, partial(hold, place, rank, sleep), **changes)
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    first, second = error_lines(result.stderr)
    sentence = f"{NO_PROGRESS}rank {rank} did not arrive: in {where}. Stacks are in {bench.runs / name}/hang-rank-*.txt."
    assert first == second and re.fullmatch(".+".join(map(re.escape, sentence.split("…"))), first), first
    stacks = [hang_file(bench.runs / name, number).read_text() for number in range(2)]
    assert all(first in text and "most recent call first" in text for text in stacks) and "in sleep" in stacks[rank]


def test_a_rank_that_does_not_come_to_the_first_connection_of_the_devices(bench):
    result = attempt(bench, "unconnected", partial(hold, "connecting the devices", 1, sleep))
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    head = f"{NO_PROGRESS}rank 1 did not arrive: in building the accelerator, for "
    assert [line.startswith(head) for line in error_lines(result.stderr)] == [True, True], result.stderr[-3000:]
    assert result.stderr.count("in connect_devices") == 1, "rank 0 waits there"


STOPPED = {
    # The rank that works is not ended before it waits itself.
    "while another tokenizes": (
        1,
        [partial(hold, "after tokenizing", 1, stop), partial(hold, "tokenizing", 0, compute)],
        ["rank 1 did not arrive: no answer, last heard of in tokenizing. Stacks"],
        "in raise_together",
    ),
    # Without torch elastic that is rank 0, and nobody can be asked.
    "host of the store": (
        0,
        [partial(hold, "forward and backward", 0, stop)],
        [f"rank 1 stopped moving: in step {STEP}, ", "cannot be asked"],
        "most recent call first",
    ),
}
"""Which rank is stopped, by what, what the other one says, and what is in its stacks."""


@pytest.mark.parametrize("name", STOPPED)
def test_a_rank_that_is_stopped_is_named_by_the_other(bench, name):
    stopped, faults, words, in_stacks = STOPPED[name]
    result = attempt(bench, name, *faults, data__cache_dir=bench.runs / f"cache, {name}")
    assert result.returncodes[stopped] == -signal.SIGKILL and result.returncodes[1 - stopped] == EXIT_HANG
    (said_once,) = error_lines(result.stderr)
    assert all(part in said_once for part in words), said_once
    assert in_stacks in hang_file(bench.runs / name, 1 - stopped).read_text()
    assert not hang_file(bench.runs / name, stopped).exists()


def test_a_job_that_is_suspended_and_goes_on_does_not_hang(bench):
    result = attempt(bench, "suspended", partial(hold, "forward and backward", 0, suspend), preset="single")
    assert result.returncodes == [0], result.stderr[-3000:]
    assert list((bench.runs / "suspended").glob("hang-rank-*")) == []
