"""What counts as work of a process that reports nothing: its CPU time, that of its children, and what they read and write.
Steps and phases: their bars on a terminal, and their lines elsewhere."""

import errno
import io
import logging
import re
import subprocess
import sys
import tempfile
import time
from unittest.mock import Mock

import psutil
import pytest
from datasets import Dataset

from toolkit.data.tokens import prepare
from toolkit.distributed import progress as module
from toolkit.distributed.activity import Activity
from toolkit.distributed.progress import Phase, Progress

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


@pytest.mark.parametrize(
    ("act", "uncounted_s", "works"),
    [
        *((act, float, True) for act in (compute, compute_in_a_child, write_slowly)),
        (sleep, float, False),
        (compute, time.thread_time, False),  # all of the CPU time is of a thread that does not count
    ],
)
def test_what_is_work(act, uncounted_s, works):
    activity = Activity(WINDOW_S)
    activity.restart(uncounted_s())
    assert not activity.has_worked(uncounted_s()), "the window is not over"
    act()
    time.sleep(WINDOW_S / 10)
    assert activity.has_worked(uncounted_s()) is works


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


SPEED = {"tokens_per_s": 12345.6, "tokens_per_s_per_rank": 12345.6}
FIGURES = {"loss": 2.5, "learning_rate": 1e-3, "speed": SPEED}


@pytest.mark.parametrize(
    ("total", "unit", "lines"),
    [
        (None, "rows", ["reading: 3,000,000 rows", "reading: 6,000,000 rows"]),
        (10**7, "rows", ["reading: 3,000,000 of 10,000,000 rows, 28 s left", "reading: 6,000,000 of 10,000,000 rows, 16 s left"]),
        (10**7, "B", ["reading: 0.00 of 0.01 GB, 28 s left", "reading: 0.01 of 0.01 GB, 16 s left"]),
        (6_000_000, "rows", ["reading: 3,000,000 of 6,000,000 rows, 12 s left", "reading: 6,000,000 of 6,000,000 rows"]),
    ],
)
def test_a_long_phase_has_a_line_every_ten_seconds_and_at_its_end(total, unit, lines, capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    for rank, num, said in ((0, 6, lines), (0, 2, []), (1, 6, [])):  # a short phase and other ranks print nothing
        monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        with Phase("reading", total, unit) as phase:
            for _ in range(num):
                now_s += 4
                phase.add(1_000_000)
        assert capsys.readouterr() == ("".join(f"{line}\n" for line in said), "")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tokenizing_reports_rows_of_all_processes(num_workers, capfd, monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_S", 0)
    monkeypatch.setattr(prepare, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    rows, count = Dataset.from_dict({"text": ["a"] * 4001}), lambda rows: {"length": [*map(len, rows["text"])]}
    assert sum(map(len, prepare.tokenize_rows(rows, count, "train", num_workers))) == 4001
    out, err = capfd.readouterr()
    numbers = [int(found.replace(",", "")) for found in re.findall(r"^tokenizing train rows: ([\d,]+) of 4,001 rows", out, re.M)]
    assert numbers == [1000, 2000, 3000, 4000, 4001]
    assert err == ""


def test_a_line_at_the_stated_steps_and_at_the_last_one(capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    progress = Progress(num_steps=4003, start_step=1000, every_steps=1000)
    for step in (1001, 2000, 2200, 3000, 4000, 4003):  # checks, evaluations and saves read the figures too
        now_s = 3600 + 9.0 * (step - 1000)  # an evaluation of an hour came first, which the time left does not count again
        progress.update(step, **FIGURES)
        if step == 2200:
            logging.getLogger("toolkit").info("saved")
    progress.close()
    figures = "loss 2.5000, lr 1.00e-03, 12,346 tokens/s"
    assert capsys.readouterr().out.splitlines() == [
        f"step 2000/4003, {figures}, 5 h 00 min left",
        "saved",
        f"step 3000/4003, {figures}, 2 h 30 min left",
        f"step 4000/4003, {figures}, 27 s left",
        f"step 4003/4003, {figures}",
    ]
    for rank, said in ((0, ", 12,346 tokens/s (6,173 a rank), MFU 41.2 %\n"), (1, "")):  # several ranks on a known GPU
        monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        progress = Progress(num_steps=2, start_step=0, every_steps=1)
        progress.update(2, **FIGURES | {"speed": SPEED | {"tokens_per_s_per_rank": 6172.8, "mfu_percent": 41.25}})
        progress.close()
        assert capsys.readouterr().out.endswith(said) and (rank == 0 or not said)


def test_bars_of_steps_and_of_a_phase_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    terminal.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", "80")
    progress = Progress(num_steps=8, start_step=2, every_steps=1)
    for since in ("start_t", "last_print_t"):  # an evaluation of an hour came first
        setattr(progress._bar, since, getattr(progress._bar, since) - 3600)
    progress.update(5, **FIGURES)
    logging.getLogger("toolkit").info("evaluated")
    progress.update(8, **FIGURES | {"loss": 1.0})
    progress.close()
    shown = terminal.getvalue()
    assert "2/8" in shown and "8/8" in shown and "loss 1.0000" in shown
    last = shown.rpartition("\r")[2].rstrip()
    assert "####" in last and last.endswith("[00:00<00:00, loss 1.0000, lr 1.00e-03, 12,346 tokens/s]") and len(last) <= 80
    assert capsys.readouterr().out == "evaluated\n"

    monkeypatch.setattr(module, "BAR_DELAY_S", 0)
    with Phase("reading the data", None, "rows") as phase:  # which counts without an end
        phase.add(1234)
        phase._bar.refresh()
        assert "\rreading the data: 1234 rows [" in terminal.getvalue()
