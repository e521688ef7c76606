"""Every family of causal models trains, generates, saves and exports under FSDP2; adapters are in `test_adapter_runs.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.workbench import RELOAD, Workbench, run_without_toolkit
from toolkit.files.json_lines import load_json_lines

LOGIT_TOLERANCE = 1e-4
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest."""
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 256}


@pytest.fixture(scope="module")
def trained(llm_bench: Workbench) -> dict[str, str]:
    """Every family trained for three steps: what its run printed."""
    return llm_bench.run_all({family: {"model": family} for family in CAUSAL_FAMILIES})


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_family_trains_generates_and_saves(llm_bench: Workbench, trained: dict[str, str], family: str) -> None:
    assert [line["step"] for line in llm_bench.lines(family, "train")] == [1, 2, 3]
    assert "every rank loads all of" not in trained[family]
    assert llm_bench.checkpoints(family) == ["step-00000003"]
    (evaluation,) = llm_bench.lines(family, "eval")
    assert evaluation["step"] == 3 and {"rougeL", "exact_match"} <= evaluation.keys()
    assert len(load_json_lines(llm_bench.runs / family / "predictions-3.jsonl")) == 3


@pytest.mark.usefixtures("trained")
def test_plain_transformers_reads_every_export(llm_bench: Workbench, tmp_path: Path) -> None:
    found = run_without_toolkit(RELOAD, [llm_bench.runs / family for family in CAUSAL_FAMILIES], tmp_path)
    assert found.keys() == CAUSAL_FAMILIES.keys()
    assert all(about["export"] <= LOGIT_TOLERANCE for about in found.values()), found


def test_a_model_that_cannot_tell_packed_rows_apart_trains_on_them_unpacked(llm_bench: Workbench, tmp_path: Path) -> None:
    shutil.copytree(llm_bench.models["llama"], tmp_path / "bloom", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "bloom" / "config.json").write_text(json.dumps(BLOOM))
    change = {"model": tmp_path / "bloom", "model__from_scratch": True, "preset": "single"}
    printed = llm_bench.run("bloom", **change)
    assert printed.index("rows are not packed (data.packing auto): Bloom") < printed.index(": read as ")
    assert "nothing left to train" in llm_bench.run("bloom", **change)  # as the checkpoint says, too
