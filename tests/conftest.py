"""What tests that start ranks share: a place for the runs of a file or of a test, with tiny models and rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it imports torch, which some unit tests do without
    from tests.support.workbench import Workbench


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The runs of one file of tests, on the tiny T5 unless they say otherwise."""
    from tests.support.workbench import new_bench

    return new_bench(tmp_path_factory, request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="module")
def llm_bench(bench: Workbench) -> Workbench:
    from tests.support.workbench import ROWS

    return replace(bench, recipe="llm", rows=ROWS["llm"])


@pytest.fixture
def workbench(bench: Workbench, tmp_path: Path) -> Workbench:
    """Runs of one test, on the tiny T5 unless it says otherwise."""
    return replace(bench, runs=tmp_path)


@pytest.fixture
def llm_workbench(llm_bench: Workbench, tmp_path: Path) -> Workbench:
    return replace(llm_bench, runs=tmp_path)
