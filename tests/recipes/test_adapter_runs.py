"""Adapters through the recipes: no rank's slice is lost, what is exported is what was trained, and the base stays as it was."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.recipes.test_resume import list_tensors, on_one_process
from tests.support.launch import run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench, run_without_toolkit

LORA: dict[str, Any] = {"adapter__method": "lora", "adapter__rank": 3, "adapter__alpha": 6, "optim__lr": 1e-2}
"""Two ranks share three rows of A unevenly."""
NO_TEXTS = {"eval__generate": False}

TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", FP32, {"adapter__method": "dora"}),
    "dora_bf16": ("llama", {}, {"adapter__method": "dora"}),
    "rslora": ("gpt2", FP32, {"adapter__method": "rslora"}),
    "rslora_bf16": ("qwen3", {}, {"adapter__method": "rslora", "adapter__target_modules": ["q_proj", "v_proj"]}),
    "saved": ("llama", FP32, {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_tied_bf16": ("llama_tied", {}, {"adapter__modules_to_save": ["embed_tokens"]}),
    "bf16_base_in_fp32": ("llama", FP32, {"model__frozen_dtype": "bfloat16"}),
}
"""Model, precision and settings of runs under FSDP2."""

RELOAD = """
from peft import PeftModel
from safetensors.torch import load_file
import transformers

for run in runs:
    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    kind = "AutoModelForSeq2SeqLM" if "decoder_input_ids" in check else "AutoModelForCausalLM"
    settings = json.loads((run / "export" / "adapter_config.json").read_text())
    load = getattr(transformers, kind).from_pretrained

    def difference(model):
        return ((model.eval()(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()).item()

    about = found[run.name] = {"base": difference(load(settings["base_model_name_or_path"]))}
    about["adapted"] = difference(PeftModel.from_pretrained(load(settings["base_model_name_or_path"]), run / "export"))
    if (run / "merged").is_dir():
        about["merged"] = difference(load(run / "merged"))
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], data_folder: Path) -> Workbench:
    """The runs of this file on causal models."""
    runs = tmp_path_factory.mktemp("adapters")
    return Workbench(runs=runs, models=model_folders, data=data_folder, recipe="llm", rows="prompts.jsonl")


@pytest.fixture(scope="module")
def t5_bench(bench: Workbench) -> Workbench:
    """Runs of the other recipe beside them."""
    return Workbench(runs=bench.runs, models=bench.models, data=bench.data)


@pytest.fixture(scope="module")
def gathered(bench: Workbench) -> dict[str, np.ndarray]:
    """A run `gathered` on two ranks whose B was drawn at random before the export; all parameters, gathered by hand before it."""
    flags = bench.flags("gathered", export__merge=True, **LORA, **NO_TEXTS)
    return run_on_ranks(train_and_gather, preset="fsdp2_cpu", overrides=FP32, args=(flags,))[0]


@pytest.fixture(scope="module")
def t5_printed(t5_bench: Workbench) -> str:
    """A run `t5` of three steps; what it prints when it goes on to the fifth."""
    settings = LORA | {"adapter__dropout": 0.1, "export__merge": True}
    t5_bench.run("t5", **settings)
    return t5_bench.run("t5", train__max_steps=5, **settings)


@pytest.fixture(scope="module")
def trained(bench: Workbench) -> list[str]:
    """All runs of `TRAINED`, by their names."""
    for name, (model, overrides, settings) in TRAINED.items():
        bench.run(name, model=model, overrides=overrides, **LORA | NO_TEXTS | {"export__merge": True} | settings)
    return list(TRAINED)


def test_a_checkpoint_has_every_ranks_slice(bench: Workbench, tmp_path: Path) -> None:
    base = bench.models["llama"]
    slices = run_on_ranks(save_slices, preset="fsdp2_cpu", overrides=FP32, args=(base, tmp_path))
    loaded = run_on_ranks(load_whole, preset="single", overrides=FP32, args=(base, tmp_path))[0]
    assert loaded.keys() == slices[0].keys() == slices[1].keys()
    assert {name.rpartition("/")[2] for name in loaded} == {"weight", "exp_avg", "exp_avg_sq"}
    assert any(len(slices[0][name]) != len(slices[1][name]) for name in loaded), "all slices have one size"
    for name, whole in loaded.items():
        by_hand = np.concatenate([of_rank[name] for of_rank in slices])
        assert len(np.unique(by_hand)) == by_hand.size
        np.testing.assert_array_equal(whole, by_hand, err_msg=name)


def test_the_exported_adapter_is_the_one_gathered_by_hand(bench: Workbench, gathered: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import load_file

    exported = load_file(bench.runs / "gathered" / "export" / "adapter_model.safetensors")
    by_hand = {f"base_model.model.{n.replace('.default.', '.')}": value for n, value in gathered.items() if ".lora_" in n}
    assert exported.keys() == by_hand.keys() and len(exported) == 2 * 2 * 7
    for name, value in exported.items():
        np.testing.assert_array_equal(value, by_hand[name], err_msg=name)
        assert value.dtype == np.float32 and (value != 0).all()


def test_frozen_weights_are_bit_for_bit_those_of_the_base(bench: Workbench, gathered: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import load_file

    base = load_file(bench.models["llama"] / "model.safetensors")
    frozen = {name.replace(".base_layer.", "."): value for name, value in gathered.items() if ".lora_" not in name}
    assert frozen.keys() == base.keys()
    assert all(value.tobytes() == base[name].tobytes() for name, value in frozen.items())


@pytest.mark.usefixtures("gathered", "t5_printed")
def test_plain_peft_gives_the_trained_models_logits(bench: Workbench, trained: list[str], tmp_path: Path) -> None:
    found = run_without_toolkit(RELOAD, [bench.runs / name for name in (*trained, "gathered", "t5")], tmp_path)
    assert len(found) == len(TRAINED) + 2
    for name, about in found.items():
        tolerance = 5e-2 if "bf16" in name else 1e-4
        assert about["adapted"] <= tolerance and about["merged"] <= tolerance, found
        assert about["base"] > 5 * tolerance, found


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_of_adapter_trains_what_it_should(bench: Workbench, name: str) -> None:
    from safetensors.torch import load_file

    from toolkit.models.lora_files import hash_weight

    stored = on_one_process(list_tensors, bench.runs / name / "checkpoints" / "step-00000003" / "state")
    kinds = {re.search(r"(lora_[a-zA-Z]+(_[a-z]+)*|modules_to_save)\.", tensor)[1] for tensor in stored}  # type: ignore[index]
    assert kinds == {"lora_A", "lora_B"} | (
        {"lora_magnitude_vector"} if name.startswith("dora") else {"modules_to_save"} if name.startswith("saved") else set()
    )
    settings = json.loads((bench.runs / name / "export" / "adapter_config.json").read_text())
    assert (settings["use_dora"], settings["use_rslora"]) == (name.startswith("dora"), name.startswith("rslora"))
    base = load_file(bench.models[TRAINED[name][0]] / "model.safetensors")
    record = json.loads((bench.runs / name / "export" / "base.json").read_text())
    assert record["bf16_sha256"] == {tensor: hash_weight(weight) for tensor, weight in base.items()}
    losses = [line["loss"] for line in bench.lines(name, "train")]
    assert len(set(losses)) == 3


def test_t5_trains_an_adapter_and_resumes(t5_bench: Workbench, t5_printed: str) -> None:
    assert "step-00000003, after step 3" in t5_printed
    assert [line["step"] for line in t5_bench.lines("t5", "train")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in t5_bench.lines("t5", "eval") if "rougeL" in line] == [3, 5]
    stored = on_one_process(list_tensors, t5_bench.runs / "t5" / "checkpoints" / "step-00000005" / "state")
    assert stored and all(".lora_A." in name or ".lora_B." in name for name in stored)


@pytest.mark.usefixtures("gathered")
def test_an_exported_adapter_goes_on_training(bench: Workbench) -> None:
    from safetensors.numpy import load_file

    adapter = bench.runs / "gathered" / "export"
    more = {"adapter__method": "lora", "adapter__name_or_path": adapter, "adapter__rank": 64, "eval__at_start": True}
    bench.run("further", train__max_steps=2, **more, **NO_TEXTS)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, bench.runs / "further" / "export"))
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    assert not any((after[name] == before[name]).all() for name in before)
    # Its first evaluation is of the adapter as it came, and not of a new one, which is the base.
    only_evaluated = bench.run("base", train__max_steps=0, **NO_TEXTS)
    printed = bench.run("again", train__max_steps=0, export__merge=True, **more, **NO_TEXTS)
    merged = bench.runs / "again" / "merged"
    base, start, again = (bench.lines(name, "eval")[0]["loss"] for name in ("base", "further", "again"))
    assert start == again and abs(start - base) > 1e-3
    # Zero steps are not a reason not to merge what is asked for.
    assert "nothing is exported: train.max_steps is 0\n" in only_evaluated and not (bench.runs / "base" / "export").exists()
    assert f", merged into its base to {merged}\n" in printed
    bench.run("merged", model=merged, train__max_steps=0, **NO_TEXTS)
    assert bench.lines("merged", "eval")[0]["loss"] == pytest.approx(start, rel=1e-4)


@pytest.mark.usefixtures("gathered")
def test_a_run_with_an_adapter_is_no_start_for_one_without(bench: Workbench) -> None:
    refused = bench.attempt("onto", model__init_from=bench.runs / "gathered", **NO_TEXTS)
    assert refused.returncodes == [2, 2] and "Traceback" not in refused.stderr
    assert "step-00000003 is of a run that trained an adapter: give its export as adapter.name_or_path, or" in refused.stderr


def test_embeddings_and_all_but_the_last_block_are_frozen(bench: Workbench) -> None:
    from safetensors.numpy import load_file

    freeze = {"model": "llama_tied", "model__freeze": [r"lm_head\.weight", r"model\.layers\.0\..*"], **NO_TEXTS}
    bench.run("frozen", **freeze)
    assert "after step 3\n" in bench.run("frozen", train__max_steps=5, **freeze)
    base = load_file(bench.models["llama_tied"] / "model.safetensors")
    exported = load_file(bench.runs / "frozen" / "export" / "model.safetensors")
    assert exported.keys() == base.keys()
    is_frozen = {name: name.startswith(("model.embed_tokens.", "model.layers.0.")) for name in base}
    assert {name: bool((exported[name] == base[name]).all()) for name in base} == is_frozen
    stored = on_one_process(list_tensors, bench.runs / "frozen" / "checkpoints" / "step-00000005" / "state")
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == {n for n in base if not is_frozen[n]}


def train_and_gather(argv: list[str]) -> dict[str, np.ndarray]:
    """On every rank: the recipe, with B drawn anew between training and export; all parameters, whole, by name."""
    from toolkit.training import finetune

    gathered: dict[str, np.ndarray] = {}
    finish = finetune.finish

    def draw_gather_and_finish(run: Any) -> None:
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


def save_slices(base: Path, folder: Path) -> dict[str, np.ndarray]:
    """On every rank: save an adapter and its moments with values that occur nowhere else; this rank's slices, by name."""
    import torch

    from toolkit.checkpoint.find import Goal
    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.checkpoint.state import TrainState
    from toolkit.config.schema import CheckpointConfig

    goal = Goal("loss", higher_is_better=False, measured_on={}, compared=())

    sharded, optimizer = build_adapted(base)
    next_value = 10_000_000 * int(os.environ["RANK"])  # fp32 has all whole numbers up to 2^24
    slices = {}
    for name, tensor in tensors_by_name(sharded, optimizer).items():
        local = tensor.to_local()
        local.copy_(torch.arange(next_value, next_value + local.numel()).view(local.shape))
        next_value += local.numel()
        slices[name] = local.clone().numpy()
    assert next_value % 10_000_000 < 6_000_000
    with CheckpointWriter(folder, sharded, optimizer, identity(), CheckpointConfig(), goal) as writer:
        writer.save(TrainState(step=1), wait=True)
    return slices


def load_whole(base: Path, folder: Path) -> dict[str, np.ndarray]:
    """On one process: the same from the checkpoint, into a new model that is not sharded."""
    from toolkit.checkpoint.load import load_checkpoint
    from toolkit.checkpoint.manifest import read_checkpoint

    sharded, optimizer = build_adapted(base)
    load_checkpoint(read_checkpoint(folder / "checkpoints" / "step-00000001"), sharded, optimizer, identity())
    return {name: tensor.numpy() for name, tensor in tensors_by_name(sharded, optimizer).items()}


def build_adapted(base: Path) -> tuple[Any, Any]:
    """A sharded model with an adapter, and an optimizer that has moments."""
    import torch
    from transformers import AutoModelForCausalLM

    from toolkit.config.schema import AdapterConfig, ModelConfig, OptimConfig
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.models.lora import add_adapter
    from toolkit.parallel.wrap import shard_model
    from toolkit.training.optim import build_optimizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    add_adapter(model, AdapterConfig(method="lora", rank=3), ModelConfig(name_or_path=str(base)), seed=0)
    sharded = shard_model(build_accelerator(), model)
    optimizer = build_optimizer(OptimConfig(), sharded.model)
    for parameter in sharded.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return sharded, optimizer


def tensors_by_name(sharded: Any, optimizer: Any) -> dict[str, Any]:
    """`…/weight`, `…/exp_avg` and `…/exp_avg_sq` of each trainable parameter, as this rank holds them."""
    found = {}
    for name, parameter in sharded.model.named_parameters():
        if parameter.requires_grad:
            found[f"{name}/weight"] = parameter.data
            found |= {f"{name}/{moment}": optimizer.state[parameter][moment] for moment in ("exp_avg", "exp_avg_sq")}
    return found


def identity() -> Any:
    """Of no particular run."""
    from toolkit.checkpoint.state import Identity

    return Identity({"eval.best_metric": "loss"}, model_config_hash="m", data_fingerprint="d", frozen_hashes={})
