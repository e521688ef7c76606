"""Progress lines and the bar."""

from __future__ import annotations

import io
import logging
import sys

from toolkit.tracking import progress as module
from toolkit.tracking.progress import Progress


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)


def test_plain_lines_at_most_every_interval_and_at_the_last_step(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(total_steps=10, start_step=4, enabled=True, min_interval_s=10)
    for step in range(5, 11):
        clock.now_s += 6
        progress.update(step, loss=2.5, learning_rate=1e-3, tokens_per_s=12345.6)
        if step == 6:
            logging.getLogger("toolkit").info("saved")
    progress.close()
    # 6 s a step from step 4 on; lines at 12 s, 24 s and at the end.
    assert capsys.readouterr().out.splitlines() == [
        "step 6/10, loss 2.5000, lr 1.00e-03, 12,346 tokens/s, 24 s left",
        "saved",
        "step 8/10, loss 2.5000, lr 1.00e-03, 12,346 tokens/s, 12 s left",
        "step 10/10, loss 2.5000, lr 1.00e-03, 12,346 tokens/s",
    ]


def test_figures_that_were_not_read_are_left_out(capsys):
    progress = Progress(total_steps=4000, start_step=0, enabled=True, min_interval_s=0)
    progress._start_s -= 9  # as if the first step had taken 9 s
    progress.update(1)
    assert capsys.readouterr().out == "step 1/4000, 9 h 59 min left\n"


def test_other_ranks_are_silent(capsys):
    progress = Progress(total_steps=2, start_step=0, enabled=False, min_interval_s=0)
    progress.update(2, loss=1.0)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(total_steps=8, start_step=2, enabled=True)
    progress.update(5, loss=1.25, tokens_per_s=1000.0)
    logging.getLogger("toolkit").info("evaluated")
    progress.update(8, loss=1.0)
    progress.close()
    shown = terminal.getvalue()
    assert "2/8" in shown and "8/8" in shown and "loss 1.0000" in shown
    assert capsys.readouterr().out == "evaluated\n"
