"""Each planted fault is caught by the test that is named for it; `tests/faults/test_verify_faults.py` asks `verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planting.faults import FAULTS
from tests.planting.nested_test import run_planted

CAUGHT = {name: fault for name, fault in FAULTS.items() if fault.test}


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught_by_its_test(tmp_path: Path, name: str) -> None:
    fault = CAUGHT[name]
    failures = run_planted(fault.test, name, tmp_path / "nested")
    assert failures, f"{fault.test} passes with {name}"
    assert fault.says in failures[0]


def test_every_fault_has_someone_who_catches_it() -> None:
    assert [name for name, fault in FAULTS.items() if not (fault.test or fault.verify)] == []
