"""Every model family trains, generates, saves and exports under FSDP2, and some resume; plain transformers reads the export.

Adapters are in `test_adapter_runs.py`.
"""

from pathlib import Path

import pytest

from tests.families.families import save_tokenizer
from tests.support.launch import run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, LANGUAGES
from tests.support.seq2seq_families import IN_PROCESS, build_collator, build_model
from tests.support.workbench import FP32, RELOAD, Workbench, run_without_toolkit, step_name
from toolkit.files.json_lines import load_json_lines

LOGIT_TOLERANCE = {"no": 1e-4, "bf16": 5e-2}
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest, by precision."""
RESUMED = ("t5", "bart", "m2m_100")
"""Families that train their last two steps by a second launch."""
UNUSED = {"encoder-decoder": [r"encoder\.pooler\..*"], "led": [r".*_global\..*"]}
"""Parameters that a text's loss does not reach: a run names them, and asks to freeze them."""

LOOK_AT_TARGETS = """
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    stored = [key for file in export.glob("*.safetensors") for key in load_file(file)]
    labels = tokenizer(text_target="alpha beta", return_tensors="pt")["input_ids"]
    plain = tokenizer(text_target="alpha beta", add_special_tokens=False)["input_ids"]
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = shift(labels)[0, 0].item() if shift else model.config.decoder_start_token_id
    marks = labels[0].tolist()[: labels[0].tolist().index(plain[0])] if getattr(tokenizer, "tgt_lang", None) else []
    about["times_stored"] = sorted({sum(stored.count(name) for name in names) for names in aliases.values()})
    about["has_ties"] = any(len(names) > 1 for names in aliases.values())
    about["text"] = tokenizer.decode(inputs[0], skip_special_tokens=True)
    about["starts_right"] = generated[0, : 1 + len(marks)].tolist() == [start, *marks]
"""


def precision(family: str) -> str:
    """Translation models run in bf16, where M2M-100's fp32 positions meet bf16 weights; so do rarer encoder-decoders."""
    return "bf16" if family in (*LANGUAGES, *IN_PROCESS) else "no"


def num_steps(family: str) -> int:
    return 3 if family in CAUSAL_FAMILIES else 5 if family in RESUMED else 2


@pytest.fixture(scope="module")
def trained(bench, llm_bench) -> dict:
    """Every family trained: what the last launch printed, and the lines of the launch before."""
    settings = {family: {"model": family} for family in FAMILIES}
    for family, (source, target) in LANGUAGES.items():
        settings[family] |= {"data__source_language": source, "data__target_language": target}
    run_on_ranks(save_models, preset="single", overrides=FP32, args=(bench.runs / "models",))
    for family in IN_PROCESS:
        settings[family] = {"model": bench.runs / "models" / family, "model__freeze": UNUSED.get(family, [])}
    run_all(bench, {family: settings[family] for family in RESUMED})
    first_lines = {family: bench.lines(family, "train") for family in RESUMED}
    printed = run_all(bench, {family: how | {"train__max_steps": num_steps(family)} for family, how in settings.items()})
    printed |= llm_bench.run_all({family: {"model": family} for family in CAUSAL_FAMILIES})
    return {"first_lines": first_lines, "printed": printed}


def save_models(parent: Path) -> None:
    for family in IN_PROCESS:
        model = build_model(family)
        model.save_pretrained(parent / family)
        save_tokenizer(family, parent / family, has_start=bool(build_collator(model).pad_token_id))


def run_all(bench: Workbench, settings: dict[str, dict]) -> dict[str, str]:
    printed = {}
    for of in LOGIT_TOLERANCE:
        runs = {family: how for family, how in settings.items() if precision(family) == of}
        printed |= bench.run_all(runs, overrides={"mixed_precision": of})
    return printed


@pytest.mark.parametrize("family", [*FAMILIES, *IN_PROCESS, *CAUSAL_FAMILIES])
def test_family_trains_generates_saves_and_resumes(bench, trained, family):
    lines, printed = bench.lines(family, "train"), trained["printed"][family]
    last = num_steps(family)
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    if family in RESUMED:
        assert lines[:3] == trained["first_lines"][family], "steps before the checkpoint ran again: their times differ"
        assert "step-00000003, after step 3" in printed
    assert ("every rank loads all of" in printed) == (family == "marian")  # whose positions are in no file, but computed
    saved = [3, 5] if family in RESUMED else [last]
    assert bench.checkpoints(family) == list(map(step_name, saved))
    evaluations = bench.lines(family, "eval")
    assert [(line["step"], line["rouge_tokenizer"]) for line in evaluations] == [(step, "rouge_score") for step in saved]
    assert len(load_json_lines(bench.runs / family / f"predictions-{last}.jsonl")) == 3
    assert (bench.runs / family / "export" / "model.safetensors").is_file()


@pytest.mark.usefixtures("trained")
def test_plain_transformers_reads_every_export(bench, tmp_path):
    found = run_without_toolkit(RELOAD + LOOK_AT_TARGETS, [bench.runs / family for family in FAMILIES], tmp_path)
    right = {"times_stored": [1], "has_ties": True, "text": "alpha beta", "starts_right": True}
    differences = {family: about.pop("export") for family, about in found.items()}
    assert found == dict.fromkeys(FAMILIES, right)
    causal = run_without_toolkit(RELOAD, [bench.runs / family for family in CAUSAL_FAMILIES], tmp_path)
    differences |= {family: about["export"] for family, about in causal.items()}
    assert all(difference <= LOGIT_TOLERANCE[precision(family)] for family, difference in differences.items()), differences
