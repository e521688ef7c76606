"""How a `UserError` reaches the user: one line from one process, exit code 2; anything else keeps its traceback."""

from __future__ import annotations

import pytest

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
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, str(value))
    error = UserError("a is 3: write 4")
    if agreed:
        error.agreed_by_all_ranks = True  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise error
    assert end.value.code == EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == ("error: a is 3: write 4\n" if speaks else "")


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="not for users"), exit_on_user_error():
        raise ValueError("not for users")
