"""`tests/run.py` runs every command, and its last lines name what failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run import main

TESTS = """
import pytest
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
@pytest.mark.parametrize("text", ["a b", "c"])
def test_text(text): assert text == "c"
def test_skipped(): pytest.skip("why not")
"""


def test_what_failed_is_named_after_all_commands_have_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (("test_bad.py", TESTS), ("test_good.py", "def test_good(): pass")):
        (tmp_path / name).write_text(text)
    bad, good = (f"--rootdir={tmp_path} {tmp_path}/test_{name}.py" for name in ("bad", "good"))
    assert main([bad, "--no-such-flag", good]) == 1
    *names, closing = capfd.readouterr().out.splitlines()[-5:]
    assert names == [
        f"FAILED, exit code 1: pytest {bad}",
        "ERROR test_bad.py::test_error",
        "FAILED test_bad.py::test_text[a b]",
        "FAILED, exit code 4: pytest --no-such-flag",
    ]
    assert re.fullmatch(r"1 failed, 2 passed, 1 skipped, 1 error in [\d.]+s", closing)
    assert main([good]) == 0
    assert re.fullmatch(r"1 passed in [\d.]+s", capfd.readouterr().out.splitlines()[-1])
