"""Every family of causal models, whole and with an adapter, trains, generates, saves and exports under FSDP2; adapters resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.workbench import Workbench, run_without_toolkit
from toolkit.files.json_lines import load_json_lines

LOGIT_TOLERANCE = 1e-4
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter__method": "lora", "adapter__rank": 2, "adapter__dropout": 0.1, "export__merge": True},
}

RELOAD = """
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

for run in runs:
    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    about = found[run.name] = {}
    for folder in filter(pathlib.Path.is_dir, (run / "export", run / "merged")):
        if (folder / "adapter_config.json").exists():
            from peft import PeftModel
            settings = json.loads((folder / "adapter_config.json").read_text())
            base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
            model = PeftModel.from_pretrained(base, folder)
        else:
            model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(loading.values()), loading
        difference = (model.eval()(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()
        inputs = AutoTokenizer.from_pretrained(folder)("alpha beta", return_tensors="pt").input_ids
        assert model.generate(input_ids=inputs, max_new_tokens=3, pad_token_id=0).shape[1] > inputs.shape[1]
        about[folder.name] = difference.item()
"""

BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 256}

TrainFamily = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def train_family(llm_bench: Workbench) -> TrainFamily:
    """Trains a family for five steps, with an adapter the last two by a second launch; once for all tests that ask."""

    @cache
    def train(family: str, kind: str) -> dict[str, Any]:
        name, settings = f"{family}-{kind}", {"model": family, **KINDS[kind]}
        if kind == "lora":
            llm_bench.run(name, **settings)
        first_lines = llm_bench.lines(name, "train")
        return {"first_lines": first_lines, "printed": llm_bench.run(name, train__max_steps=5, **settings)}

    return train


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_family_trains_generates_saves_and_resumes(
    llm_bench: Workbench, train_family: TrainFamily, family: str, kind: str
) -> None:
    trained, name = train_family(family, kind), f"{family}-{kind}"
    lines = llm_bench.lines(name, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    saved = [3, 5] if kind == "lora" else [5]
    if kind == "lora":
        assert lines[:3] == trained["first_lines"], "steps before the checkpoint ran again: their times differ"
        assert "step-00000003, after step 3" in trained["printed"]
    assert "every rank loads all of" not in trained["printed"]
    assert llm_bench.checkpoints(name) == [f"step-0000000{step}" for step in saved]
    evaluations = llm_bench.lines(name, "eval")
    assert [line["step"] for line in evaluations if "rougeL" in line and "exact_match" in line] == saved
    predictions = load_json_lines(llm_bench.runs / name / "predictions-5.jsonl")
    assert len(predictions) == 3


def test_plain_transformers_and_peft_read_every_export(llm_bench: Workbench, train_family: TrainFamily, tmp_path: Path) -> None:
    names = [f"{family}-{kind}" for family in CAUSAL_FAMILIES for kind in KINDS if train_family(family, kind)]
    found = run_without_toolkit(RELOAD, [llm_bench.runs / name for name in names], tmp_path)
    assert {name: sorted(about) for name, about in found.items()} == {
        name: ["export", "merged"] if name.endswith("lora") else ["export"] for name in names
    }
    assert all(difference <= LOGIT_TOLERANCE for about in found.values() for difference in about.values()), found


def test_a_model_that_cannot_tell_packed_rows_apart_trains_on_them_unpacked(llm_bench: Workbench, tmp_path: Path) -> None:
    shutil.copytree(llm_bench.models["llama"], tmp_path / "bloom", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "bloom" / "config.json").write_text(json.dumps(BLOOM))
    change = {"model": tmp_path / "bloom", "model__from_scratch": True, "preset": "single"}
    printed = llm_bench.run("bloom", **change)
    assert printed.index("rows are not packed (data.packing auto): Bloom") < printed.index(": read as ")
    assert "nothing left to train" in llm_bench.run("bloom", **change)  # as the checkpoint says, too
