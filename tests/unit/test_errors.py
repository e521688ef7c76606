"""How a `UserError` reaches the user: one line from one process, exit code 2; anything else keeps its traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY
from toolkit.errors import EXIT_USER_ERROR, UserError, exit_on_user_error


@pytest.mark.parametrize(
    ("rank", "local_rank", "agreed", "speaks"),
    [
        (None, None, False, True),
        (0, 0, False, True),
        (1, 1, False, False),
        (8, 0, False, True),  # a second node's first process: what is wrong there may be known there alone
        (0, 0, True, True),
        (8, 0, True, False),
        (1, 1, True, False),
    ],
)
def test_who_speaks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int | None,
    local_rank: int | None,
    agreed: bool,
    speaks: bool,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, str(value))
    error = UserError("a is 3: write 4")
    if agreed:
        error.agreed_by_all_ranks = True  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise error
    assert end.value.code == EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == ("error: a is 3: write 4\n" if speaks else "")


def test_under_torch_elastic_the_first_of_a_node_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = []
    for node, local_rank, agreed in ((0, 1, False), (0, 0, False), (1, 3, False), (1, 0, False), (2, 1, True), (3, 0, True)):
        folder = tmp_path / f"node_{node}" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        monkeypatch.setenv("GROUP_RANK", str(node))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("RANK", str(8 * node + local_rank))
        error = UserError("a is 3: write 4")
        error.agreed_by_all_ranks = agreed  # type: ignore[attr-defined]
        with pytest.raises(SystemExit), exit_on_user_error():
            raise error
        told.append(capsys.readouterr().err != "")
    assert told == [True, False, True, False, False, False]


def test_a_slow_first_process_does_not_swallow_the_sentence(tmp_path: Path) -> None:
    """With the real launcher, which stops the others as soon as one has failed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from toolkit.errors import UserError, exit_on_user_error\n"
        "time.sleep(5 if os.environ['LOCAL_RANK'] == '0' else 0)\n"
        "with exit_on_user_error():\n"
        "    raise UserError('a is 3: write 4')\n"
    )
    preset = REPOSITORY / "accelerate_configs" / "ddp_cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(preset), str(script)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert done.stderr.splitlines().count("error: a is 3: write 4") == 1, done.stderr


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="not for users"), exit_on_user_error():
        raise ValueError("not for users")
