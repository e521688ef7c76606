"""Each planted fault is caught by the test that is named for it; `tests/faults/test_verify_faults.py` asks `verify`."""

from pathlib import Path

import pytest

from tests.planting.faults import FAULTS
from tests.planting.plant import planted
from tests.support.launch import REPOSITORY

CAUGHT = {name: fault for name, fault in FAULTS.items() if fault.test}


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught_by_its_test(tmp_path, name):
    fault = CAUGHT[name]
    failures = run_planted(fault.test, name, tmp_path / "nested")
    assert failures, f"{fault.test} passes with {name}"
    assert fault.says in failures[0]


def test_every_fault_has_someone_who_catches_it():
    assert [name for name, fault in FAULTS.items() if not (fault.test or fault.verify)] == []


def run_planted(node: str, fault: str, folder: Path) -> list[str]:
    """What each part of the test that failed has said; empty where it passed.

    Args:
        node: id of one test, from the repository's root.
        folder: does not exist yet; takes what the test writes.
    """
    reports = _Reports()
    options = ["--import-mode=importlib", "--quiet", "--tb=short", "--durations=0", "-p", "no:cacheprovider", "-o", "addopts="]
    options += [f"--rootdir={REPOSITORY}", f"--basetemp={folder}"]
    with planted(fault):
        code = pytest.main([f"{REPOSITORY}/{node}", *options], plugins=[reports])
    assert reports.num_run == 1, f"{node} was not run (exit code {int(code)})"
    return reports.failures


class _Reports:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call"
        if report.failed:
            self.failures.append(report.longreprtext)
