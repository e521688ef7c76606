"""Every model family trains, generates, saves, resumes and exports under FSDP2; plain transformers reads the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import FAMILIES
from tests.support.translation_tokenizers import LANGUAGES
from tests.support.workbench import Workbench, run_without_toolkit
from toolkit.files.json_lines import load_json_lines

LOGIT_TOLERANCE = {"no": 1e-4, "bf16": 5e-2}
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest, by precision."""

RELOAD = """
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

for run in runs:
    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    model, loading = AutoModelForSeq2SeqLM.from_pretrained(run / "export", output_loading_info=True)
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    stored = [key for file in run.glob("export/*.safetensors") for key in safe_open(file, "pt").keys()]
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    labels = tokenizer(text_target="alpha beta", return_tensors="pt")["input_ids"]
    plain = tokenizer(text_target="alpha beta", add_special_tokens=False)["input_ids"]
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = shift(labels)[0, 0].item() if shift else model.config.decoder_start_token_id
    marks = labels[0].tolist()[: labels[0].tolist().index(plain[0])] if getattr(tokenizer, "tgt_lang", None) else []
    inputs = tokenizer("alpha beta gamma", return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=3)
    found[run.name] = {
        "difference": ((model.eval()(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()).item(),
        "loading": {kind: sorted(map(str, names)) for kind, names in loading.items() if names},
        "times_stored": sorted({sum(stored.count(name) for name in names) for names in aliases.values()}),
        "has_ties": any(len(names) > 1 for names in aliases.values()),
        "text": tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True),
        "generates": generated.shape[1] > 1,
        "starts_right": generated[0, : 1 + len(marks)].tolist() == [start, *marks],
    }
"""


def precision(family: str) -> str:
    """Translation models run in bf16, where M2M-100's fp32 positions meet bf16 weights."""
    return "bf16" if family in LANGUAGES else "no"


RESUMED = ("t5", "bart", "m2m_100")
"""Families that train their last two steps by a second launch."""


@pytest.fixture(scope="module")
def trained(bench: Workbench) -> dict[str, Any]:
    """Every family trained for five steps: what the last launch printed, and the lines of the launch before."""
    settings: dict[str, dict[str, Any]] = {family: {"model": family} for family in FAMILIES}
    for family, (source, target) in LANGUAGES.items():
        settings[family] |= {"data__source_language": source, "data__target_language": target}
    run_all(bench, {family: settings[family] for family in RESUMED})
    first_lines = {family: bench.lines(family, "train") for family in RESUMED}
    printed = run_all(bench, {family: how | {"train__max_steps": 5} for family, how in settings.items()})
    return {"first_lines": first_lines, "printed": printed}


def run_all(bench: Workbench, settings: dict[str, dict[str, Any]]) -> dict[str, str]:
    """In two launches, one of each precision."""
    printed = {}
    for of in LOGIT_TOLERANCE:
        runs = {family: how for family, how in settings.items() if precision(family) == of}
        printed |= bench.run_all(runs, overrides={"mixed_precision": of})
    return printed


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_generates_saves_and_resumes(bench: Workbench, trained: dict[str, Any], family: str) -> None:
    lines, printed = bench.lines(family, "train"), trained["printed"][family]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    if family in RESUMED:
        assert lines[:3] == trained["first_lines"][family], "steps before the checkpoint ran again: their times differ"
        assert "step-00000003, after step 3" in printed
    assert "every rank loads all of" not in printed
    saved = [3, 5] if family in RESUMED else [5]
    assert bench.checkpoints(family) == [f"step-0000000{step}" for step in saved]
    assert [(line["step"], line["rouge_tokenizer"]) for line in bench.lines(family, "eval")] == [
        (step, "rouge_score") for step in saved
    ]
    assert len(load_json_lines(bench.runs / family / "predictions-5.jsonl")) == 3


@pytest.mark.usefixtures("trained")
def test_plain_transformers_reads_every_export(bench: Workbench, tmp_path: Path) -> None:
    found = run_without_toolkit(RELOAD, [bench.runs / family for family in FAMILIES], tmp_path)
    differences = {family: about.pop("difference") for family, about in found.items()}
    assert found == {
        family: {
            "loading": {},
            "times_stored": [1],
            "has_ties": True,
            "text": "alpha beta gamma",
            "generates": True,
            "starts_right": True,
        }
        for family in FAMILIES
    }
    assert all(difference <= LOGIT_TOLERANCE[precision(family)] for family, difference in differences.items()), differences


def test_positions_limit_texts_and_no_rank_drops_layers(bench: Workbench) -> None:
    folder = bench.runs / "bart_with_layerdrop"
    shutil.copytree(bench.models["bart"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"encoder_layerdrop": 0.1}))
    result = bench.attempt("limited", model=folder, eval__max_new_tokens=65)
    assert all(result.returncodes)
    assert "WARNING: encoder_layerdrop of" in result.stderr and "is set to 0" in result.stderr
    assert "has only 64 positions: set eval.max_new_tokens to at most 64" in result.stderr and "Traceback" not in result.stderr
