"""Every model family trains, generates, saves and exports under FSDP2; plain transformers reads the export.

Adapters are in `test_adapter_runs.py`, resumes in `test_resume.py`.
"""

from pathlib import Path

import pytest

from tests.support.launch import run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, LANGUAGES, save_tokenizer
from tests.support.seq2seq_families import IN_PROCESS, build_collator, build_model
from tests.support.workbench import FP32, RELOAD, run_without_toolkit, step_name
from toolkit.files.json_lines import load_json_lines

NUM_STEPS = 2
LOGIT_TOLERANCE = {"no": 1e-4, "bf16": 5e-2}
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest, by precision."""
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


@pytest.fixture(scope="module")
def trained(bench, llm_bench) -> dict[str, str]:
    """What the run of each family printed."""
    settings = {family: {"model": family} for family in FAMILIES}
    for family, (source, target) in LANGUAGES.items():
        settings[family] |= {"data__source_language": source, "data__target_language": target}
    run_on_ranks(save_models, preset="single", overrides=FP32, args=(bench.runs / "models",))
    for family in IN_PROCESS:
        settings[family] = {"model": bench.runs / "models" / family, "model__freeze": UNUSED.get(family, [])}
    short = {"train__max_steps": NUM_STEPS}
    printed = llm_bench.run_all({family: {"model": family} | short for family in CAUSAL_FAMILIES})
    for of in LOGIT_TOLERANCE:
        runs = {family: how | short for family, how in settings.items() if precision(family) == of}
        printed |= bench.run_all(runs, overrides={"mixed_precision": of})
    return printed


def save_models(parent: Path) -> None:
    for family in IN_PROCESS:
        model = build_model(family)
        model.save_pretrained(parent / family)
        save_tokenizer(family, parent / family, has_start=bool(build_collator(model).pad_token_id))


@pytest.mark.parametrize("family", [*FAMILIES, *IN_PROCESS, *CAUSAL_FAMILIES])
def test_family_trains_generates_and_saves(bench, trained, family):
    assert [line["step"] for line in bench.lines(family, "train")] == [1, NUM_STEPS]
    # The positions of this one are in no file, but computed.
    assert ("every rank loads all of" in trained[family]) == (family == "marian")
    assert bench.checkpoints(family) == [step_name(NUM_STEPS)]
    (evaluation,) = bench.lines(family, "eval")
    assert (evaluation["step"], evaluation["rouge_tokenizer"]) == (NUM_STEPS, "rouge_score")
    assert len(load_json_lines(bench.runs / family / f"predictions-{NUM_STEPS}.jsonl")) == 3
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
