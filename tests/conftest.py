"""What tests that start ranks share: a place for the runs of a file or of a test, with tiny models and rows."""

from dataclasses import replace

import pytest


@pytest.fixture(scope="module")
def bench(request, tmp_path_factory):
    """The runs of one file of tests, on the tiny T5 unless they say otherwise."""
    from tests.support.workbench import new_bench  # it imports torch, which some unit tests do without

    return new_bench(tmp_path_factory, request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="module")
def llm_bench(bench):
    from tests.support.workbench import ROWS

    return replace(bench, recipe="llm", rows=ROWS["llm"])


@pytest.fixture
def workbench(bench, tmp_path):
    """Runs of one test, on the tiny T5 unless it says otherwise."""
    return replace(bench, runs=tmp_path)


@pytest.fixture
def llm_workbench(llm_bench, tmp_path):
    return replace(llm_bench, runs=tmp_path)
