"""What all recipe tests share: model folders and rows, built once a test run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.launch import run_on_ranks
from tests.support.model_folders import build_model_folders
from tests.support.workbench import ROWS, Workbench, save_rows

# Of what a test computes itself: two threads spin while they wait for each other, where ranks want the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tiny random model and its tokenizer, by family."""
    parent = tmp_path_factory.mktemp("models")
    return run_on_ranks(build_model_folders, preset="single", overrides={"mixed_precision": "no"}, args=(parent,))[0]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_rows(folder)
    return folder


@pytest.fixture(scope="module")
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], data_folder: Path
) -> Workbench:
    """The runs of one file of tests, on the tiny T5 unless they say otherwise."""
    runs = tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
    return Workbench(runs=runs, models=model_folders, data=data_folder)


@pytest.fixture(scope="module")
def llm_bench(bench: Workbench) -> Workbench:
    return replace(bench, recipe="llm", rows=ROWS["llm"])


@pytest.fixture
def workbench(tmp_path: Path, model_folders: dict[str, Path], data_folder: Path) -> Workbench:
    """Runs of one test, on the tiny T5 unless it says otherwise."""
    return Workbench(runs=tmp_path, models=model_folders, data=data_folder)


@pytest.fixture
def llm_workbench(workbench: Workbench) -> Workbench:
    return replace(workbench, recipe="llm", rows=ROWS["llm"])
