"""What counts as work of a process that reports nothing: its CPU time, that of its children, and what they read and write."""

import errno
import subprocess
import sys
import tempfile
import time
from unittest.mock import Mock

import psutil
import pytest

from toolkit.distributed.activity import Activity

WINDOW_S = 0.3
COMPUTE = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"


def compute_in_a_child() -> None:
    """A child's child computes; then it ends, and its parent lives on."""
    inner = f"[sys.executable, '-c', {COMPUTE.format(seconds=2 * WINDOW_S)!r}]"
    code = f"import subprocess, sys, time\nsubprocess.run({inner})\nprint('done', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"done\n"
        child.kill()


def compute() -> None:
    exec(COMPUTE.format(seconds=2 * WINDOW_S))


def write_slowly() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(10):
            time.sleep(WINDOW_S / 10)
            file.write(bytes(2**14))


def sleep() -> None:
    time.sleep(2 * WINDOW_S)


@pytest.mark.parametrize(("act", "works"), [(compute, True), (compute_in_a_child, True), (write_slowly, True), (sleep, False)])
def test_what_is_work(act, works):
    activity = Activity(WINDOW_S)
    assert not activity.has_worked(0.0), "the window is not over"
    act()
    time.sleep(WINDOW_S / 10)
    assert activity.has_worked(0.0) is works


def test_threads_that_do_not_count():
    """All of the CPU time is of such a thread."""
    activity, before_s = Activity(WINDOW_S), time.thread_time()
    activity.restart(before_s)
    compute()
    assert not activity.has_worked(time.thread_time())


def test_a_child_counts_where_the_system_hides_other_processes_and_a_look_that_fails_ends_nothing(monkeypatch):
    """As /proc mounted with hidepid=1: psutil then lists no children at all. With an error, the thread that keeps the time would
    end, and the run would go on unwatched."""
    monkeypatch.setattr(psutil.Process, "children", Mock(side_effect=psutil.AccessDenied(pid=1)))
    activity = Activity(WINDOW_S)
    with subprocess.Popen([sys.executable, "-S", "-c", COMPUTE.format(seconds=60)]) as child:
        sleep()
        assert activity.has_worked(0.0)
        child.kill()
    monkeypatch.setattr(psutil, "process_iter", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    activity = Activity(WINDOW_S)
    compute()
    assert activity.has_worked(0.0)
