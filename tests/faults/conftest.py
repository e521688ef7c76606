"""What the fault tests share: a tiny model, rows, and a run that nothing interrupts."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.faults.harness import SAVED, WHOLE, attempt_with, whole_checkpoints
from tests.recipes.runs import FP32, Workbench
from tests.support.launch import run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, build_model_folders, make_rows, save_jsonl


@pytest.fixture(scope="session")
def faulty_bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A bench for runs of the fault tests, with the finished run `WHOLE` on it."""
    here = tmp_path_factory.mktemp("faults")
    models = run_on_ranks(build_t5, preset="single", overrides=FP32, args=(here / "models",))[0]
    save_jsonl(here / "rows.jsonl", make_rows(30))
    bench = Workbench(runs=here / "runs", models=models, data=here)
    outcome = attempt_with(bench, WHOLE)
    assert outcome.returncodes == [0, 0], outcome.stderr[-6000:]
    assert whole_checkpoints(bench.runs / WHOLE) == list(SAVED)
    return bench


def build_t5(parent: Path) -> dict[str, Path]:
    with patch.dict(FAMILIES, {"t5": FAMILIES["t5"]}, clear=True), patch.dict(CAUSAL_FAMILIES, clear=True):
        return build_model_folders(parent)
