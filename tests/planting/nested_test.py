"""Run a test with a fault planted, in this process, whose fork server and cached inputs it shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planting.plant import planted
from tests.support.launch import REPOSITORY


def run_planted(node: str, fault: str, folder: Path) -> list[str]:
    """What each part of the test that failed has said; empty where it passed.

    Args:
        node: id of one test, from the repository's root.
        folder: does not exist yet; takes what the test writes.
    """
    reports = _Reports()
    options = [
        "--import-mode=importlib",
        "--quiet",
        "--tb=short",
        "--durations=0",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        f"--basetemp={folder}",
    ]
    with planted(fault):
        code = pytest.main([f"{REPOSITORY}/{node}", f"--rootdir={REPOSITORY}", *options], plugins=[reports])
    assert reports.num_run == 1, f"{node} was not run (exit code {int(code)})"
    return reports.failures


class _Reports:
    """Collects how the test went."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call"
        if report.failed:
            self.failures.append(report.longreprtext)
