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
from pathlib import Path

import pytest

from tests.faults.harness import SCRIPT, Fault, arguments, start_with
from tests.faults.workers.faulty_recipe import in_phase, this_rank, wrap
from tests.support.launch import LaunchResult, Running
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import Workbench
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint import save as checkpoint_writer
from toolkit.data.tokens import prepare
from toolkit.distributed.rank_status import hang_file
from toolkit.errors import EXIT_HANG
from toolkit.export.model_files import ModelFiles
from toolkit.training import setup

TIMEOUT_S = 4
"""Of the watchdog."""
BUSY_S = 1.5 * TIMEOUT_S
"""How long what moves goes on."""
FOREVER_S = 600.0
STEP = 3

END_S = 300.0
"""Until when a run must have ended."""

PLACES = {
    "connecting the devices": (setup, "connect_devices"),  # which rank 1 never calls
    "tokenizing": (prepare, "tokenize_rows"),  # on rank 0 alone
    "after tokenizing": (prepare, "on_all_ranks"),  # where rank 1 has nothing to tokenize
    "loading the checkpoint": (checkpoint, "load_tensors"),
    "saving": (checkpoint_writer, "describe_files"),  # in the thread that writes the first checkpoint
    "export": (ModelFiles, "add"),  # on rank 0 alone, between two gathers
}


def sleep() -> None:
    time.sleep(FOREVER_S)


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


def check_hang(result: LaunchResult, folder: Path, sentence: str) -> None:
    """Both ranks said the sentence (`…` stands for anything) and left their stacks."""
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    start, end = f"error: no progress for {TIMEOUT_S} s (run.timeout_s): ", f". Stacks are in {folder}/hang-rank-*.txt."
    pattern = ".+".join(re.escape(part) for part in f"{start}{sentence}{end}".split("…"))
    sentences = error_lines(result.stderr)
    assert len(sentences) == 2 and sentences[0] == sentences[1]
    assert re.fullmatch(pattern, sentences[0]), f"{sentences[0]}\nis not\n{start}{sentence}{end}"
    for rank in range(2):
        text = hang_file(folder, rank).read_text()
        assert sentences[0] in text and "most recent call first" in text


@pytest.fixture(scope="module")
def bench(bench) -> Workbench:
    often = {"eval__every_steps": 3, "checkpoint__every_steps": 3}
    return replace(bench, changes={"train__max_steps": 5, "run__timeout_s": TIMEOUT_S, **often})


def hold_up(bench: Workbench, name: str, *faults: Fault, **changes) -> Running:
    """Start a run whose ranks are held up."""
    return start_with(bench, name, *faults, exports=True, **changes)


def test_every_rank_shows_its_stacks_under_the_real_launcher(bench):
    """It ends the other ranks a tenth of a second after one has ended."""
    argv = arguments(bench, "launched", partial(hold, "forward and backward", 1, sleep))
    launcher = accelerate_launch(SCRIPT, argv, folder=bench.runs, preset="ddp_cpu")
    printed = finish(launcher)
    assert launcher.returncode != 0
    assert f"exitcode  : {EXIT_HANG}" in printed, printed[-3000:]
    # Of each rank, in one write; it may stand within a line of the other rank's stacks, which are written in pieces.
    said = f"error: no progress for {TIMEOUT_S} s (run.timeout_s): rank 1 did not arrive: in step {STEP}"
    assert printed.count(said) == 2, printed[-3000:]
    assert all("most recent call first" in hang_file(bench.runs / "launched", rank).read_text() for rank in range(2))


@pytest.fixture(scope="module")
def slow_run(bench) -> Path:
    """A run that its ranks waited for much longer than the patience, while rank 0 computed and, later, wrote slowly."""
    ways = {"tokenizing": compute, "saving": compute, "export": write_slowly}
    faults = [partial(hold, place, 0, way) for place, way in ways.items()]
    with hold_up(bench, "slow", *faults, data__cache_dir=bench.runs / "slow cache") as running:
        result = running.wait(2 * END_S)
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    return bench.runs / "slow"


def test_long_work_that_moves_is_never_ended(slow_run):
    assert (slow_run / "export" / "config.json").exists() and list(slow_run.glob("hang-rank-*")) == []


SLEEPS = {
    "saving": (1, "step 5, saving, for … s, at …"),  # the thread that writes sleeps while training goes on, up to the last save
    "tokenizing": (0, "tokenizing, for … s, at test_hangs.py:… in sleep"),
    "loading the checkpoint": (1, "loading the checkpoint, for … s, at test_hangs.py:… in sleep"),
    "export": (0, "export, for … s, at test_hangs.py:… in sleep"),
}
"""By where a rank sleeps: which one, and what is said of it."""


@pytest.mark.parametrize("place", SLEEPS)
def test_a_rank_that_sleeps_is_named_with_its_place(place, bench, request):
    (rank, where), name = SLEEPS[place], place.replace(" ", "_")
    changes = {"data__cache_dir": bench.runs / f"{name} cache"} if place == "tokenizing" else {}  # not done yet
    if place == "loading the checkpoint":
        request.getfixturevalue("slow_run").rename(bench.runs / name)
    with hold_up(bench, name, partial(hold, place, rank, sleep), **changes) as running:
        result = running.wait(2 * END_S)
    check_hang(result, bench.runs / name, f"rank {rank} did not arrive: in {where}")
    assert "in sleep" in hang_file(bench.runs / name, rank).read_text()


def test_a_rank_that_does_not_come_to_the_first_connection_of_the_devices(bench):
    with hold_up(bench, "unconnected", partial(hold, "connecting the devices", 1, sleep)) as running:
        result = running.wait(END_S)
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    where = "in building the accelerator, for "
    head = f"error: no progress for {TIMEOUT_S} s (run.timeout_s): rank 1 did not arrive: {where}"
    assert [line.startswith(head) for line in error_lines(result.stderr)] == [True, True], result.stderr[-3000:]
    assert result.stderr.count("in connect_devices") == 1, "rank 0 waits there"


def test_a_rank_that_is_stopped_while_another_tokenizes(bench):
    """The rank that works is not ended before it waits itself."""
    faults = [partial(hold, "after tokenizing", 1, stop), partial(hold, "tokenizing", 0, compute)]
    with hold_up(bench, "stopped", *faults, data__cache_dir=bench.runs / "stopped cache") as running:
        wait_until(lambda: not is_alive(running.pids[0]), running)
        os.kill(running.pids[1], signal.SIGKILL)
        result = running.wait(END_S)
    assert result.returncodes == [EXIT_HANG, -signal.SIGKILL]
    (said_once,) = error_lines(result.stderr)
    assert "rank 1 did not arrive: no answer, last heard of in tokenizing. Stacks" in said_once
    assert "in raise_together" in hang_file(bench.runs / "stopped", 0).read_text()


def test_where_the_host_of_the_store_is_stopped_nobody_can_be_asked(bench):
    """Without torch elastic that is rank 0."""
    with hold_up(bench, "host", partial(hold, "forward and backward", 0, stop)) as running:
        wait_until(lambda: not is_alive(running.pids[1]), running)
        os.kill(running.pids[0], signal.SIGKILL)
        result = running.wait(END_S)
    assert result.returncodes == [-signal.SIGKILL, EXIT_HANG]
    (said_once,) = error_lines(result.stderr)
    assert f"rank 1 stopped moving: in step {STEP}, " in said_once and "cannot be asked" in said_once
    folder = bench.runs / "host"
    assert hang_file(folder, 1).exists() and not hang_file(folder, 0).exists()


def test_a_job_that_is_suspended_and_goes_on_does_not_hang(bench):
    with hold_up(bench, "suspended", partial(hold, "forward and backward", 0, suspend), preset="single") as running:
        result = running.wait(END_S)
    assert result.returncodes == [0], result.stderr[-3000:]
    assert list((bench.runs / "suspended").glob("hang-rank-*")) == []


def is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; not where it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], running: Running) -> None:
    """Wait for it; AssertionError after `END_S`."""
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, running.last_words()
        time.sleep(0.1)
