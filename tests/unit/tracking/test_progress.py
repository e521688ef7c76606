"""The lines and the bar of the steps."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from toolkit.tracking import progress as module
from toolkit.tracking.progress import Progress

FIGURES: dict[str, Any] = {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_s": 12345.6}


def test_a_line_at_the_stated_steps_and_at_the_last_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    progress = Progress(num_steps=4003, start_step=1000, every_steps=1000)
    for step in (1001, 2000, 2200, 3000, 4000, 4003):  # checks, evaluations and saves read the figures too
        now_s = 9.0 * (step - 1000)
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


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rank", lambda: 1)
    progress = Progress(num_steps=2, start_step=0, every_steps=1)
    progress.update(2, **FIGURES)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    progress = Progress(num_steps=8, start_step=2, every_steps=1)
    progress.update(5, **FIGURES)
    logging.getLogger("toolkit").info("evaluated")
    progress.update(8, **FIGURES | {"loss": 1.0})
    progress.close()
    shown = terminal.getvalue()
    assert "2/8" in shown and "8/8" in shown and "loss 1.0000" in shown
    last = shown.rpartition("\r")[2].rstrip()
    assert "####" in last and last.endswith("00:00, loss 1.0000, lr 1.00e-03, 12,346 tokens/s]") and len(last) <= 80
    assert capsys.readouterr().out == "evaluated\n"
