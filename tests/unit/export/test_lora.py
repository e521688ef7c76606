"""An exported adapter is what plain peft gives back; the merged model is what plain transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.support.adapter_models import adapted, forward_inputs, load_base, logits, randomize, save_base
from toolkit.export.lora import compare_adapter, compare_merged, merge, write_adapter
from toolkit.models.lora_files import hash_base
from toolkit.parallel.wrap import copy_on_meta

Tensors = dict[str, torch.Tensor]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama_tied", {}),
    ("llama_tied", {"method": "dora", "modules_to_save": ["embed_tokens"]}),
    ("llama_tied", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    ("llama", {"method": "rslora", "target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    ("llama", {"method": "dora", "modules_to_save": ["lm_head"], "target_modules": ["embed_tokens", "o_proj"]}),
    ("gpt2", {"method": "dora"}),
    ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    ("t5", {"method": "dora", "target_modules": ["q", "v"]}),
    ("t5", {"method": "rslora", "modules_to_save": ["final_layer_norm"]}),
]
IDS = [f"{name}-{settings.get('method', 'lora')}-{'-'.join(settings.get('modules_to_save', []))}" for name, settings in CASES]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def trained(bases: Path, name: str, settings: dict[str, Any]) -> tuple[PreTrainedModel, Tensors, Tensors]:
    """A model with a trained adapter, a forward's inputs with its logits, and its weights by name."""
    model = adapted(save_base(bases / name, name), name, **settings)
    randomize(model)
    inputs = forward_inputs(model)
    check = {**inputs, "logits": logits(model, inputs)}
    assert not torch.allclose(check["logits"], logits(load_base(bases / name, name), inputs), atol=1e-3)
    return model, check, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def own(model: PreTrainedModel, weights: Tensors) -> Tensors:
    return {name: weights[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_plain_peft_gives_the_trained_model_back(bases: Path, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model, check, weights = trained(bases, name, settings)
    skeleton = copy_on_meta(model)
    write_adapter(tmp_path, skeleton, own(model, weights), hash_base(model))
    compare_adapter(tmp_path, skeleton, own(model, weights), check, torch.float32)
    reloaded = PeftModel.from_pretrained(load_base(bases / name, name), str(tmp_path))
    torch.testing.assert_close(logits(reloaded, forward_inputs(model)), check["logits"])
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["task_type"] == ("SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM")
    assert written["base_model_name_or_path"] == str(bases / name)
    auto: Any = AutoPeftModelForSeq2SeqLM if name == "t5" else AutoPeftModelForCausalLM
    torch.testing.assert_close(logits(auto.from_pretrained(str(tmp_path)), forward_inputs(model)), check["logits"])


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_plain_transformers_loads_the_merged_model(bases: Path, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model, check, weights = trained(bases, name, settings)
    merged = merge(copy_on_meta(model), weights)
    merged.save_pretrained(tmp_path)
    compare_merged(tmp_path, merged, check, torch.float32)
    auto: Any = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    reloaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(reloaded) is type(load_base(bases / name, name))
    torch.testing.assert_close(logits(reloaded, forward_inputs(model)), check["logits"], rtol=1e-4, atol=1e-5)


def test_the_merged_model_has_the_dtype_of_the_base(bases: Path, tmp_path: Path) -> None:
    model, check, weights = trained(bases, "llama", {"modules_to_save": ["lm_head"]})
    in_bf16 = {n: w if n in own(model, weights) else w.to(torch.bfloat16) for n, w in weights.items()}
    merged = merge(copy_on_meta(model), in_bf16)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    merged.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    compare_merged(tmp_path, merged, check, torch.float32)  # by the tolerance of bf16


def test_what_was_not_written_right_is_found(bases: Path, tmp_path: Path) -> None:
    model, check, weights = trained(bases, "llama", {"target_modules": ["q_proj"]})
    skeleton = copy_on_meta(model)
    write_adapter(tmp_path, skeleton, own(model, weights), {})
    name = "model.layers.1.self_attn.q_proj.lora_B.default.weight"
    changed = {**own(model, weights), name: weights[name] + 1e-6}
    with pytest.raises(RuntimeError, match=f"{name} is not what was trained"):
        compare_adapter(tmp_path, skeleton, changed, check, torch.bfloat16)
    with pytest.raises(RuntimeError, match="differ by .* of the largest, more than 0.0001"):
        compare_adapter(tmp_path, skeleton, own(model, weights), {**check, "logits": check["logits"] * 1.1}, torch.float32)


def test_logits_that_differ_under_bf16_are_reported(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, check, weights = trained(bases, "llama", {"target_modules": ["q_proj"]})
    skeleton = copy_on_meta(model)
    write_adapter(tmp_path, skeleton, own(model, weights), {})
    compare_adapter(tmp_path, skeleton, own(model, weights), {**check, "logits": check["logits"] * 1.1}, torch.bfloat16)
    assert "more than 0.05; the adapter is bit for bit the trained one" in capsys.readouterr().err


def test_the_same_adapter_is_written_the_same_way(bases: Path, tmp_path: Path) -> None:
    """Sets have another order in every process; a resumed run must not write another file."""
    model, _, weights = trained(bases, "llama", {"modules_to_save": ["lm_head", "norm"]})
    write_adapter(tmp_path, copy_on_meta(model), own(model, weights), {})
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(written["target_modules"])
    assert written["modules_to_save"] == ["lm_head", "model.norm"]
