"""`make test-versions` names a Python that it lacks and a lower bound that is too low, and fails by either."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests import versions
from tests.support.launch import REPOSITORY


def test_a_python_that_is_not_there_is_said_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        versions.main(["python9.8", "python9.9"])
    rows = capsys.readouterr().out.splitlines()[-3:]
    asked = [("python9.8", "lowest"), ("python9.8", "newest"), ("python9.9", "constraints.txt")]
    for row, (interpreter, kind) in zip(rows, asked, strict=True):
        assert row.startswith(f"| {interpreter} | {kind} |") and f"NOT RUN: {interpreter} cannot be started" in row


def test_a_lower_bound_that_is_not_what_was_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    bounds = {
        requirement.name.replace("_", "-").lower(): next(part.version for part in requirement.specifier if part.operator == ">=")
        for requirement in versions.dependencies()
    }
    assert bounds.keys() >= {"torch", "transformers", "rouge-score", "pyyaml"} and version("torch") >= bounds["torch"]
    assert versions.low_bounds(bounds) == versions.low_bounds(bounds | {"torch": bounds["torch"] + ".0+cpu"}) == []
    assert versions.low_bounds(bounds | {"numpy": "2.0.1"}) == [f"numpy>={bounds['numpy']} took 2.0.1"]
