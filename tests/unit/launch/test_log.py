"""The log of a program and of a library, its level, its ranks, and its lines beside a progress bar."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest
from tqdm import tqdm

from toolkit.errors import EXIT_USER_ERROR
from toolkit.launch.log import start_logging

logger = logging.getLogger("toolkit")


def log_three() -> None:
    logger.info("a \x1b[2J% remark")
    logger.warning("something\nis lost")
    logger.warning("a damaged cache", extra={"concerns_this_rank": True})


@pytest.mark.parametrize(
    ("rank", "level", "out", "err"),
    [
        (None, None, "a \\x1b[2J% remark\n", "WARNING: something\nis lost\nWARNING: a damaged cache\n"),
        ("0", "warning", "", "WARNING: something\nis lost\nWARNING: a damaged cache\n"),
        ("1", "INFO", "", "WARNING: rank 1: a damaged cache\n"),
        ("1", "ERROR", "", ""),
    ],
)
def test_rank_and_level_decide_what_is_printed(
    rank: str | None, level: str | None, out: str, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", rank), ("TOOLKIT_LOG_LEVEL", level)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    start_logging()
    log_three()
    assert capsys.readouterr() == (out, err)


def test_handlers_of_the_program_get_the_records_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    monkeypatch.setenv("RANK", "1")
    caplog.set_level(logging.INFO)
    start_logging()
    log_three()
    assert logger.handlers == [] and logger.level == logging.NOTSET and logger.propagate
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", "rank 1: a damaged cache")]
    assert capsys.readouterr() == ("", "")


def test_an_import_changes_nothing() -> None:
    code = "import logging; before = logging.getLogger('toolkit').__dict__.copy(); import toolkit.launch.log; "
    code += "assert vars(logging.getLogger('toolkit')) == before and not logging.root.handlers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_line_does_not_break_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=3, file=terminal, ascii=True) as bar:
        bar.update(1)
        logger.info("evaluated")
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert "evaluated" in lines, lines


def test_a_level_that_is_none_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_LOG_LEVEL", "LOUD")
    done = subprocess.run([sys.executable, "-m", "toolkit", "check", "x.yaml"], capture_output=True, text=True, timeout=60)
    sentence = "error: TOOLKIT_LOG_LEVEL is LOUD, which is no level: set one of INFO, WARNING, ERROR, or unset it\n"
    assert (done.returncode, done.stderr) == (EXIT_USER_ERROR, sentence)
