"""Adapters through the recipes: no rank's slice is lost, what is exported is what was trained, and the base stays as it was.

On a base in codes also: first lines, a resume on other ranks, both merges, and the same base in another precision.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.recipes.test_export import export
from tests.recipes.test_resume import load_whole, on_one_process
from tests.support.launch import run_on_ranks
from tests.support.quantized.models import save_quantizable_models
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, RELOAD, Workbench, call_toolkit, run_without_toolkit
from toolkit.checkpoint.manifest import read_manifest
from toolkit.models.lora_files import hash_weight
from toolkit.models.quantized import dequantize, find_scales, quantize

LORA = {"adapter__method": "lora", "adapter__rank": 3, "adapter__alpha": 6, "optim__lr": 1e-2}
"""Two ranks share three rows of A unevenly."""
BF16 = {"mixed_precision": "bf16"}
NO_TEXTS = {"eval__generate": False}

TRAINED = {
    "plain": ("llama", FP32, {}),
    "dora_bf16": ("llama", BF16, {"adapter__method": "dora"}),
    "rslora": ("gpt2", FP32, {"adapter__method": "rslora"}),
    "saved": ("llama", FP32, {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_tied_bf16": ("llama_tied", BF16, {"adapter__modules_to_save": ["embed_tokens"]}),
    "bf16_base_in_fp32": ("llama", FP32, {"model__frozen_dtype": "bfloat16"}),
    "on_fp8": ("fp8", FP32, {}),
}
"""Model, precision and settings of runs under FSDP2."""


def build_fp8(folder: Path, llama: Path) -> None:
    """A model that is quantized already, with a tokenizer."""
    import transformers

    from tests.support.quantized.models import save_fp8_model

    save_fp8_model(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(bench, llm_bench, tmp_path_factory) -> list[str]:
    """Names of the finished runs: those of `TRAINED`, and of a T5."""
    bench.run("t5", **LORA | {"adapter__dropout": 0.1, "export__merge": True})
    fp8 = tmp_path_factory.mktemp("fp8")
    run_on_ranks(build_fp8, preset="single", overrides=FP32, args=(fp8, llm_bench.models["llama"]))
    of_kinds = replace(llm_bench, models=llm_bench.models | {"fp8": fp8})
    always = LORA | NO_TEXTS | {"export__merge": True}
    for precision in (FP32, BF16):
        of = {name: (model, settings) for name, (model, overrides, settings) in TRAINED.items() if overrides == precision}
        runs = {name: {"model": model} | always | settings for name, (model, settings) in of.items()}
        of_kinds.run_all(runs, overrides=precision)
    return [*TRAINED, "t5"]


def test_plain_peft_gives_the_trained_models_logits(llm_bench, trained, tmp_path):
    """Of which every rank holds a part."""
    found = run_without_toolkit(RELOAD, [llm_bench.runs / name for name in trained], tmp_path)
    assert len(found) == len(TRAINED) + 1
    for name, about in found.items():
        tolerance = 5e-2 if "bf16" in name else 1e-4
        assert about["merged"] <= tolerance, found
        if name != "on_fp8":  # whose base plain libraries would run in codes
            assert about["export"] <= tolerance and about["base"] > 5 * tolerance, found


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", [name for name in TRAINED if not name.startswith("on_")])
def test_every_kind_of_adapter_trains_what_it_should(llm_bench, name):
    import torch

    stored = on_one_process(load_whole, llm_bench.checkpoint(name, 3) / "state")
    for tensor, value in load_file(llm_bench.runs / name / "export" / "adapter_model.safetensors").items():
        if ".lora_A." in tensor or ".lora_B." in tensor:
            in_checkpoint = tensor.removeprefix("base_model.").replace(".weight", ".default.weight")
            assert torch.equal(value, stored[in_checkpoint]) and (value != 0).all(), tensor
    kinds = {re.search(r"(lora_[a-zA-Z]+(_[a-z]+)*|modules_to_save)\.", tensor)[1] for tensor in stored}
    assert kinds == {"lora_A", "lora_B"} | (
        {"lora_magnitude_vector"} if name.startswith("dora") else {"modules_to_save"} if name.startswith("saved") else set()
    )
    settings = json.loads((llm_bench.runs / name / "export" / "adapter_config.json").read_text())
    assert (settings["use_dora"], settings["use_rslora"]) == (name.startswith("dora"), name.startswith("rslora"))
    base = load_file(llm_bench.models[TRAINED[name][0]] / "model.safetensors")
    record = json.loads((llm_bench.runs / name / "export" / "base.json").read_text())
    assert record["bf16_sha256"] == {tensor: hash_weight(weight) for tensor, weight in base.items()}
    losses = [line["loss"] for line in llm_bench.lines(name, "train")]
    assert len(set(losses)) == 3


@pytest.mark.usefixtures("trained")
def test_an_adapter_on_a_base_in_fp8_generates_as_its_merged_model(llm_bench, capsys):
    """That ranks read the values of its codes, and of those of bitsandbytes: `tests/distributed/test_weights.py`."""
    run = llm_bench.runs / "on_fp8"
    assert len({line["loss"] for line in llm_bench.lines("on_fp8", "train")}) == 3
    assert "quantization" not in (run / "merged" / "config.json").read_text()
    words = [word for text in ("alpha beta", "gamma", "delta alpha") for word in ("--text", text)]
    texts = []
    for folder in (run, run / "merged"):
        assert call_toolkit("generate", folder, *words, "--max-new-tokens", 8) == 0, capsys.readouterr()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].count("\n") == 3


@pytest.mark.usefixtures("trained")
def test_an_exported_adapter_goes_on_training(llm_bench):
    adapter = llm_bench.runs / "plain" / "export"
    more = {"adapter__method": "lora", "adapter__name_or_path": adapter, "adapter__rank": 64, "eval__at_start": True}
    merged = llm_bench.runs / "again" / "merged"
    runs = {
        "further": {"train__max_steps": 2} | more,
        "base": {"train__max_steps": 0},
        "again": {"train__max_steps": 0, "export__merge": True} | more,
        "merged": {"train__max_steps": 0, "model": merged},
    }
    printed = llm_bench.run_all({name: how | NO_TEXTS for name, how in runs.items()})
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, llm_bench.runs / "further" / "export")
    )
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    assert not any((after[name] == before[name]).all() for name in before)
    # Its first evaluation is of the adapter as it came, and not of a new one, which is the base.
    of_base, start, again = (llm_bench.lines(name, "eval")[0]["loss"] for name in ("base", "further", "again"))
    assert start == again and abs(start - of_base) > 1e-3
    # Zero steps are not a reason not to merge what is asked for.
    assert "nothing is exported: train.max_steps is 0\n" in printed["base"] and not (llm_bench.runs / "base" / "export").exists()
    assert f", merged into its base to {merged}\n" in printed["again"]
    assert llm_bench.lines("merged", "eval")[0]["loss"] == pytest.approx(start, rel=1e-4)


@pytest.mark.usefixtures("trained")
def test_a_run_with_an_adapter_is_no_start_for_one_without(llm_bench):
    refused = llm_bench.attempt("onto", model__init_from=llm_bench.runs / "plain", **NO_TEXTS)
    assert "step-00000003 is of a run that trained an adapter: give its export as adapter.name_or_path, or" in refused.refusal()


# --- On a base in codes.

OF_RANK_4 = {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2, "eval__generate": False}
NF4 = OF_RANK_4 | {"adapter__base_dtype": "nf4"}
LONGER = NF4 | {"train__max_steps": 4, "checkpoint__every_steps": 2, "checkpoint__keep_last": 9, "export__merge": True}
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def wide(llm_bench) -> Workbench:
    """A bench whose Llama has rows that 64 divides."""
    run_on_ranks(save_quantizable_models, preset="single", overrides=FP32, args=(llm_bench.runs / "models",))
    return replace(llm_bench, models={"llama": llm_bench.runs / "models" / "llm"})


@pytest.fixture(scope="module")
def base(wide) -> dict:
    return load_file(wide.models["llama"] / "model.safetensors")


@pytest.fixture(scope="module")
def printed(wide) -> str:
    return wide.run("whole", **LONGER)


def test_a_run_says_what_is_quantized_and_keeps_hashes_of_codes_and_of_the_original_base(wide, printed, base):
    """Codes that another version makes otherwise are another base, even of the same files."""
    stored = load_file(wide.runs / "whole" / "export" / "adapter_model.safetensors")
    num_base, num_lora = (sum(weight.numel() for weight in weights.values()) for weights in (base, stored))
    assert f" {num_base + num_lora:,} parameters, {num_lora:,} (" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("base ")]
    kept = "model.embed_tokens.weight (float32), model.layers.*.self_attn.q_norm.weight (float32), "
    assert line.startswith(f"base        quantized to nf4 in blocks of 64 inputs, except {kept}") and "proj" not in line

    hashes = read_manifest(wide.checkpoint("whole", 4))["identity"]["frozen_hashes"]
    held = [f"{UP}.base_layer.{end}" for end in ("codes", "scales", "weight")]
    assert set(held) <= hashes.keys() and len({hashes[name] for name in held}) == 3
    assert hashes[held[2]] == hash_weight(base[f"{UP}.weight"])
    record = json.loads((wide.runs / "whole" / "export" / "base.json").read_text())
    known = record["bf16_sha256"]
    assert record["name_or_path"] == str(wide.models["llama"]) and base.keys() - {"lm_head.weight"} <= known.keys()
    assert known == {name: hash_weight(base[name]) for name in known}


@pytest.mark.usefixtures("printed")
def test_a_resume_on_three_ranks_is_the_same_run(wide):
    """On two it is one of `tests/recipes/test_resume.py`."""
    shutil.copytree(wide.runs / "whole", wide.runs / "on-3", ignore=shutil.ignore_patterns("step-00000004", "export", "merged"))
    settings = LONGER | {"overrides": FP32 | {"num_processes": 3}, "train__micro_batch_size_rows": 1}
    assert "after step 2\n" in wide.run("on-3", **settings)
    whole, resumed = (wide.lines(of, "train") for of in ("whole", "on-3"))
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for figure in ("loss", "grad_norm"):
        np.testing.assert_allclose([of[figure] for of in resumed], [of[figure] for of in whole], rtol=1e-5)
    one, two = (load_file(wide.runs / of / "export" / "adapter_model.safetensors") for of in ("whole", "on-3"))
    for tensor, value in one.items():
        np.testing.assert_allclose(two[tensor], value, rtol=1e-4, atol=1e-5)


def test_both_merges_are_what_they_say(wide, printed, base, tmp_path):
    run = wide.runs / "whole"
    assert f"{run}/merged is merged into the dequantized nf4 base, on which the adapter was trained" in printed
    assert f"logits of {run}/export differ from the trained model's by " in printed
    original, dequantized = (tmp_path / name for name in ("original", "dequantized"))
    merge = [run, "--merge", "--to"]
    first, second = export([*merge, original, "--export.merge_into", "original"], [*merge, dequantized])
    assert first[0] == second[0] == 0, (first, second)
    assert f"logits of {original} differ from the trained model's by " in first[1]
    assert "it is merged into the original base, and the adapter was trained on that in nf4" in first[1]
    adapter = load_file(run / "export" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{UP}.lora_{end}.weight"] for end in "AB")
    weight = base[f"{UP}.weight"]
    for place, expected in ((original, weight), (dequantized, dequantize(quantize(weight, "nf4"), find_scales(weight)))):
        merged = load_file(place / "model.safetensors")
        np.testing.assert_allclose(merged[f"{UP}.weight"], expected + 32 / 4 * b @ a, rtol=1e-5, atol=1e-7)
        assert merged.keys() == base.keys()
    assert (dequantized / "model.safetensors").read_bytes() == (run / "merged" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("printed")
def test_the_adapter_trains_on_with_or_without_codes(wide):
    runs = {"in-codes": NF4, "plain-base": OF_RANK_4}
    wide.run_all({name: how | {"adapter__name_or_path": wide.runs / "whole" / "export"} for name, how in runs.items()})
    assert all(wide.lines(name, "train")[-1]["step"] == 3 for name in runs)


def test_new_tokens_train_beside_codes(wide):
    tokens = {"model__add_tokens": ["<|new|>", "<|newer|>"]}
    said = wide.run("tokens", preset="single", export__merge=True, **NF4, **tokens)
    assert "model.embed_tokens.weight (float32)" in said
    wide.run("tokens-on-2", **NF4, **tokens)
    one, two = ([line["loss"] for line in wide.lines(name, "train")] for name in ("tokens", "tokens-on-2"))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_an_evaluation_stays_in_codes_where_only_they_fit(wide):
    names = ("evaluated-plain", "evaluated-in-codes")
    flags = [wide.flags(name, **NF4 | {"eval__generate": True, "train__max_steps": 1}) for name in names]
    found = run_on_ranks(evaluate_each, preset="fsdp2_cpu", overrides=FP32, args=(flags,))
    assert found == [[{"torch.float32"}, {"torch.float32", "torch.uint8"}]] * 2
    losses = [wide.lines(name, "eval")[-1] for name in names]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6) and losses[0]["rougeL"] == losses[1]["rougeL"]


def evaluate_each(flags: list[list[str]]) -> list[set[str]]:
    """On every rank: the dtypes of the copies that runs evaluate. The first has room for weights, others for codes only."""
    return [evaluate(of_run, has_room=not number) for number, of_run in enumerate(flags)]


def evaluate(flags: list[str], has_room: bool) -> set[str]:
    from toolkit.parallel import gather

    seen: set[str] = set()
    replica, fits_whole = gather._replica, gather.fits_whole

    def fits(sharded, skeleton) -> bool:
        fits_whole(sharded, skeleton)
        return has_room or gather.is_quantized(skeleton)

    def look(*args):
        made = replica(*args)
        seen.update(str(parameter.dtype) for parameter in made.parameters())
        return made

    with patch.object(gather, "_replica", look), patch.object(gather, "fits_whole", fits):
        run_in_this_process("llm", flags)
    return seen
