"""Adapters through the recipes: no rank's slice is lost, what is exported is what was trained, and the base stays as it was."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.recipes.test_resume import list_tensors, on_one_process
from tests.support.launch import run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, RELOAD, call_toolkit, run_without_toolkit

LORA = {"adapter__method": "lora", "adapter__rank": 3, "adapter__alpha": 6, "optim__lr": 1e-2}
"""Two ranks share three rows of A unevenly."""
BF16 = {"mixed_precision": "bf16"}
NO_TEXTS = {"eval__generate": False}

TRAINED = {
    "dora_bf16": ("llama", BF16, {"adapter__method": "dora"}),
    "rslora": ("gpt2", FP32, {"adapter__method": "rslora"}),
    "saved": ("llama", FP32, {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_tied_bf16": ("llama_tied", BF16, {"adapter__modules_to_save": ["embed_tokens"]}),
    "bf16_base_in_fp32": ("llama", FP32, {"model__frozen_dtype": "bfloat16"}),
    "on_fp8": ("fp8", FP32, {}),
}
"""Model, precision and settings of runs under FSDP2."""


@pytest.fixture(scope="module")
def gathered(llm_bench) -> dict[str, np.ndarray]:
    """A run `gathered` on two ranks whose B was drawn at random before the export; all parameters, gathered by hand before it."""
    flags = llm_bench.flags("gathered", export__merge=True, **LORA, **NO_TEXTS)
    return run_on_ranks(train_and_gather, preset="fsdp2_cpu", overrides=FP32, args=(flags,))[0]


@pytest.fixture(scope="module")
def t5_run(bench):
    bench.run("t5", **LORA | {"adapter__dropout": 0.1, "export__merge": True})


def build_fp8(folder: Path, llama: Path) -> None:
    """A model that is quantized already, with a tokenizer."""
    import transformers

    from tests.support.quantized.models import save_fp8_model

    save_fp8_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(llm_bench, tmp_path_factory) -> list[str]:
    fp8 = tmp_path_factory.mktemp("fp8")
    run_on_ranks(build_fp8, preset="single", overrides=FP32, args=(fp8, llm_bench.models["llama"]))
    bench = replace(llm_bench, models=llm_bench.models | {"fp8": fp8})
    always = LORA | NO_TEXTS | {"export__merge": True}
    for precision in (FP32, BF16):
        of = {name: (model, settings) for name, (model, overrides, settings) in TRAINED.items() if overrides == precision}
        runs = {name: {"model": model} | always | settings for name, (model, settings) in of.items()}
        bench.run_all(runs, overrides=precision)
    return list(TRAINED)


def test_the_exported_adapter_is_the_one_gathered_by_hand(llm_bench, gathered):
    from safetensors.numpy import load_file

    exported = load_file(llm_bench.runs / "gathered" / "export" / "adapter_model.safetensors")
    by_hand = {f"base_model.model.{n.replace('.default.', '.')}": value for n, value in gathered.items() if ".lora_" in n}
    assert exported.keys() == by_hand.keys() and len(exported) == 2 * 2 * 7
    for name, value in exported.items():
        np.testing.assert_array_equal(value, by_hand[name], err_msg=name)
        assert value.dtype == np.float32 and (value != 0).all()


def test_frozen_weights_are_bit_for_bit_those_of_the_base(llm_bench, gathered):
    from safetensors.numpy import load_file

    base = load_file(llm_bench.models["llama"] / "model.safetensors")
    frozen = {name.replace(".base_layer.", "."): value for name, value in gathered.items() if ".lora_" not in name}
    assert frozen.keys() == base.keys()
    assert all(value.tobytes() == base[name].tobytes() for name, value in frozen.items())


@pytest.mark.usefixtures("gathered", "t5_run")
def test_plain_peft_gives_the_trained_models_logits(llm_bench, trained, tmp_path):
    found = run_without_toolkit(RELOAD, [llm_bench.runs / name for name in (*trained, "gathered", "t5")], tmp_path)
    assert len(found) == len(TRAINED) + 2
    for name, about in found.items():
        tolerance = 5e-2 if "bf16" in name else 1e-4
        assert about["merged"] <= tolerance, found
        if name != "on_fp8":  # whose base plain libraries would run in codes
            assert about["export"] <= tolerance and about["base"] > 5 * tolerance, found


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", [name for name in TRAINED if not name.startswith("on_")])
def test_every_kind_of_adapter_trains_what_it_should(llm_bench, name):
    from safetensors.torch import load_file

    from toolkit.models.lora_files import hash_weight

    stored = on_one_process(list_tensors, llm_bench.runs / name / "checkpoints" / "step-00000003" / "state")
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


@pytest.mark.usefixtures("gathered")
def test_an_exported_adapter_goes_on_training(llm_bench):
    from safetensors.numpy import load_file

    adapter = llm_bench.runs / "gathered" / "export"
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
    base, start, again = (llm_bench.lines(name, "eval")[0]["loss"] for name in ("base", "further", "again"))
    assert start == again and abs(start - base) > 1e-3
    # Zero steps are not a reason not to merge what is asked for.
    assert "nothing is exported: train.max_steps is 0\n" in printed["base"] and not (llm_bench.runs / "base" / "export").exists()
    assert f", merged into its base to {merged}\n" in printed["again"]
    assert llm_bench.lines("merged", "eval")[0]["loss"] == pytest.approx(start, rel=1e-4)


@pytest.mark.usefixtures("gathered")
def test_a_run_with_an_adapter_is_no_start_for_one_without(llm_bench):
    refused = llm_bench.attempt("onto", model__init_from=llm_bench.runs / "gathered", **NO_TEXTS)
    assert "step-00000003 is of a run that trained an adapter: give its export as adapter.name_or_path, or" in refused.refusal()


def train_and_gather(argv: list[str]) -> dict[str, np.ndarray]:
    """On every rank: the recipe, with B drawn anew between training and export; all parameters, whole, by name."""
    from toolkit.training import finetune

    gathered: dict[str, np.ndarray] = {}
    finish = finetune.finish

    def draw_gather_and_finish(run) -> None:
        import torch

        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        for name, parameter in run.sharded.model.named_parameters():
            if ".lora_B." in name:
                local = parameter.data.to_local()
                local.copy_(0.2 * torch.randn(local.shape, generator=generator))
            gathered[name] = parameter.detach().full_tensor().clone().numpy()
        finish(run)

    with patch.object(finetune, "finish", draw_gather_and_finish):
        run_in_this_process("llm", argv)
    return gathered
