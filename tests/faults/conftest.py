"""What the fault tests share: a tiny model, rows, and a run that nothing interrupts."""

from dataclasses import replace

import pytest
import torch

from tests.faults.harness import CHANGES, SAVED, WHOLE, complete_checkpoints, run_with
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.workbench import Workbench, new_bench

torch.set_num_threads(1)  # as in tests/recipes/conftest.py


@pytest.fixture(scope="session")
def faulty_bench(tmp_path_factory) -> Workbench:
    """A bench for runs with `CHANGES`, with the finished run `WHOLE` on it."""
    data = tmp_path_factory.mktemp("30-rows")
    save_jsonl(data / "rows.jsonl", make_rows(30))
    bench = replace(new_bench(tmp_path_factory, "faults"), data=data, changes=CHANGES)
    run_with(bench, WHOLE)
    assert complete_checkpoints(bench.runs / WHOLE) == list(SAVED)
    return bench
