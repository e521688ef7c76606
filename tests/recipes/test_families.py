"""Every model family trains, generates, saves, resumes and exports under FSDP2; plain transformers reads the export.

Adapters are in `test_adapter_runs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES
from tests.support.translation_tokenizers import LANGUAGES
from tests.support.workbench import RELOAD, Workbench, run_without_toolkit
from toolkit.files.json_lines import load_json_lines

LOGIT_TOLERANCE = {"no": 1e-4, "bf16": 5e-2}
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest, by precision."""

RELOAD_SEQ2SEQ = """
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


def num_steps(family: str) -> int:
    return 5 if family in RESUMED else 2


@pytest.fixture(scope="module")
def trained(bench: Workbench) -> dict[str, Any]:
    """Every family trained: what the last launch printed, and the lines of the launch before."""
    settings: dict[str, dict[str, Any]] = {family: {"model": family} for family in FAMILIES}
    for family, (source, target) in LANGUAGES.items():
        settings[family] |= {"data__source_language": source, "data__target_language": target}
    run_all(bench, {family: settings[family] for family in RESUMED})
    first_lines = {family: bench.lines(family, "train") for family in RESUMED}
    printed = run_all(bench, {family: how | {"train__max_steps": num_steps(family)} for family, how in settings.items()})
    return {"first_lines": first_lines, "printed": printed}


def run_all(bench: Workbench, settings: dict[str, dict[str, Any]]) -> dict[str, str]:
    printed = {}
    for of in LOGIT_TOLERANCE:
        runs = {family: how for family, how in settings.items() if precision(family) == of}
        printed |= bench.run_all(runs, overrides={"mixed_precision": of})
    return printed


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_generates_saves_and_resumes(bench: Workbench, trained: dict[str, Any], family: str) -> None:
    lines, printed = bench.lines(family, "train"), trained["printed"][family]
    last = num_steps(family)
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    if family in RESUMED:
        assert lines[:3] == trained["first_lines"][family], "steps before the checkpoint ran again: their times differ"
        assert "step-00000003, after step 3" in printed
    assert "every rank loads all of" not in printed
    saved = [3, 5] if family in RESUMED else [last]
    assert bench.checkpoints(family) == [f"step-0000000{step}" for step in saved]
    assert [(line["step"], line["rouge_tokenizer"]) for line in bench.lines(family, "eval")] == [
        (step, "rouge_score") for step in saved
    ]
    assert len(load_json_lines(bench.runs / family / f"predictions-{last}.jsonl")) == 3


@pytest.mark.usefixtures("trained")
def test_plain_transformers_reads_every_export(bench: Workbench, tmp_path: Path) -> None:
    found = run_without_toolkit(RELOAD_SEQ2SEQ, [bench.runs / family for family in FAMILIES], tmp_path)
    differences = {family: about.pop("difference") for family, about in found.items()}
    right = {"loading": {}, "times_stored": [1], "text": "alpha beta gamma", "generates": True, "starts_right": True}
    assert found == {family: right | {"has_ties": True} for family in FAMILIES}
    assert all(difference <= LOGIT_TOLERANCE[precision(family)] for family, difference in differences.items()), differences


@pytest.fixture(scope="module")
def causal(llm_bench: Workbench) -> dict[str, str]:
    return llm_bench.run_all({family: {"model": family} for family in CAUSAL_FAMILIES})


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_causal_family_trains_generates_and_saves(llm_bench: Workbench, causal: dict[str, str], family: str) -> None:
    assert [line["step"] for line in llm_bench.lines(family, "train")] == [1, 2, 3]
    assert "every rank loads all of" not in causal[family]
    assert llm_bench.checkpoints(family) == ["step-00000003"]
    (evaluation,) = llm_bench.lines(family, "eval")
    assert evaluation["step"] == 3 and {"rougeL", "exact_match"} <= evaluation.keys()
    assert len(load_json_lines(llm_bench.runs / family / "predictions-3.jsonl")) == 3


@pytest.mark.usefixtures("causal")
def test_plain_transformers_reads_every_causal_export(llm_bench: Workbench, tmp_path: Path) -> None:
    found = run_without_toolkit(RELOAD, [llm_bench.runs / family for family in CAUSAL_FAMILIES], tmp_path)
    assert found.keys() == CAUSAL_FAMILIES.keys()
    assert all(about["export"] <= LOGIT_TOLERANCE["no"] for about in found.values()), found
