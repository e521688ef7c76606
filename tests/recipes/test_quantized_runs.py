"""Adapters on a base in codes through the recipe: first lines, resume, exports, and the same base in another precision."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.recipes.test_export import export
from tests.support.launch import run_on_ranks
from tests.support.quantized.models import save_quantizable_models
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench
from toolkit.checkpoint.manifest import read_manifest
from toolkit.models.lora_files import hash_weight
from toolkit.models.quantized import dequantize, find_scales, quantize

LORA = {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2, "eval__generate": False}
NF4 = LORA | {"adapter__base_dtype": "nf4"}
LONGER = NF4 | {"train__max_steps": 4, "checkpoint__every_steps": 2, "checkpoint__keep_last": 9, "export__merge": True}
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantized-models")
    run_on_ranks(save_quantizable_models, preset="single", overrides={"mixed_precision": "no"}, args=(folder,))
    return folder


@pytest.fixture(scope="module")
def wide(llm_bench, folder) -> Workbench:
    return dataclasses.replace(llm_bench, models={"llama": folder / "llm"})


@pytest.fixture(scope="module")
def printed(wide) -> str:
    return wide.run("whole", **LONGER)


def test_the_first_lines_say_what_is_quantized_and_true_numbers(wide, printed):
    num_base = sum(weight.numel() for weight in load_file(wide.models["llama"] / "model.safetensors").values())
    stored = load_file(wide.runs / "whole" / "export" / "adapter_model.safetensors")
    num_lora = sum(weight.numel() for weight in stored.values())
    assert f" {num_base + num_lora:,} parameters, {num_lora:,} (" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("base ")]
    kept = "model.embed_tokens.weight (float32), model.layers.*.self_attn.q_norm.weight (float32), "
    assert line.startswith(f"base        quantized to nf4 in blocks of 64 inputs, except {kept}")
    assert "proj" not in line


@pytest.mark.usefixtures("printed")
def test_a_resume_on_three_ranks_is_the_same_run(wide):
    """On two it is one of `tests/recipes/test_llm_resume.py`."""
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


@pytest.mark.usefixtures("printed")
def test_codes_that_another_version_makes_otherwise_are_another_base_even_of_the_same_files(wide):
    hashes = read_manifest(wide.checkpoint("whole", 4))["identity"]["frozen_hashes"]
    held = [f"{UP}.base_layer.{end}" for end in ("codes", "scales", "weight")]
    assert set(held) <= hashes.keys() and len({hashes[name] for name in held}) == 3
    weight = load_file(wide.models["llama"] / "model.safetensors")[f"{UP}.weight"]
    assert hashes[held[2]] == hash_weight(weight)


def test_both_merges_are_what_they_say(wide, printed, tmp_path):
    run, base = wide.runs / "whole", load_file(wide.models["llama"] / "model.safetensors")
    assert f"{run}/merged is merged into the dequantized nf4 base, on which the adapter was trained" in printed
    assert f"logits of {run}/export differ from the trained model's by " in printed
    original, dequantized = (tmp_path / name for name in ("original", "dequantized"))
    first, second = export(
        [run, "--merge", "--to", original, "--export.merge_into", "original"],
        [run, "--merge", "--to", dequantized],
    )
    assert first[0] == second[0] == 0, (first, second)
    assert f"logits of {original} differ from the trained model's by " in first[1]
    assert "it is merged into the original base, and the adapter was trained on that in nf4" in first[1]
    adapter = load_file(run / "export" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{UP}.lora_{end}.weight"] for end in "AB")
    weight = base[f"{UP}.weight"]
    started_from = {
        original: weight,
        dequantized: dequantize(quantize(weight, "nf4"), find_scales(weight)),
    }
    for place, expected in started_from.items():
        merged = load_file(place / "model.safetensors")
        np.testing.assert_allclose(merged[f"{UP}.weight"], expected + 32 / 4 * b @ a, rtol=1e-5, atol=1e-7)
        assert merged.keys() == base.keys()
    assert (dequantized / "model.safetensors").read_bytes() == (run / "merged" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("printed")
def test_the_adapter_names_the_original_base_and_trains_on_with_or_without_codes(wide):
    record = json.loads((wide.runs / "whole" / "export" / "base.json").read_text())
    base = load_file(wide.models["llama"] / "model.safetensors")
    tied = {name for name in base if name not in record["bf16_sha256"]}
    assert record["name_or_path"] == str(wide.models["llama"]) and tied <= {"lm_head.weight"}
    assert record["bf16_sha256"] == {name: hash_weight(weight) for name, weight in base.items() if name not in tied}
    runs = {"in-codes": NF4, "plain": LORA}
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
    found = run_on_ranks(evaluate_both, preset="fsdp2_cpu", overrides=FP32, args=(flags,))
    assert found == [[{"torch.float32"}, {"torch.float32", "torch.uint8"}]] * 2
    losses = [wide.lines(name, "eval")[-1] for name in names]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6) and losses[0]["rougeL"] == losses[1]["rougeL"]


def evaluate_both(flags: list[list[str]]) -> list[set[str]]:
    return [evaluate(flags[0], has_room=True), evaluate(flags[1], has_room=False)]


def evaluate(flags: list[str], has_room: bool) -> set[str]:
    """On every rank: the dtypes of the copy that a run evaluates. It `has_room` for weights, or for codes only."""
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
