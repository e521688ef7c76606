"""An exported adapter is what plain peft gives back; the merged model is what plain transformers does."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.support.adapter_models import adapted, compare_logits, forward_inputs, hash_base, load_base, logits, randomize
from tests.support.model_folders import _build_tokenizer
from tests.support.tiny_models import one_process
from toolkit.config.python import load_config
from toolkit.data.collate import CausalCollator
from toolkit.distributed.progress import Phase
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export import write
from toolkit.export.card import Origin
from toolkit.export.compare import reload
from toolkit.export.lora import Merge, coarsest, compare_adapter, load_adapter, write_adapter
from toolkit.export.model_files import ModelFiles
from toolkit.export.paths import ExportPaths
from toolkit.export.write import export_model
from toolkit.models.freeze import cast_frozen
from toolkit.models.lora_files import BASE_FILE, BASE_HASHES
from toolkit.models.tensor_reader import copy_on_meta, state_readers
from toolkit.models.weights import hash_frozen
from toolkit.objectives.causal import Causal
from toolkit.parallel.wrap import shard_model

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")

CASES = [
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


def trained(bases: Path, name: str, settings: dict) -> tuple[PreTrainedModel, Tensors, Tensors]:
    """A model with a trained adapter, a forward's inputs with its logits, and its weights by name."""
    model = adapted(bases / name, name, **settings)
    randomize(model)
    inputs = forward_inputs(model)
    check = {**inputs, "logits": logits(model, inputs)}
    assert not torch.allclose(check["logits"], logits(load_base(bases / name, name), inputs), atol=1e-3)
    return model, check, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def write_merged(folder: Path, model: PreTrainedModel, weights: Tensors) -> PreTrainedModel:
    """Write the merged model as an export does; returns it on the meta device."""
    merge = Merge(copy_on_meta(model), own(model, weights))
    files = ModelFiles(folder, merge.model, "5GB")
    files.begin()
    for name, weight in weights.items():
        if (merged := merge.merged(name, weight)) is not None:
            other, values = merged
            files.add(other, values.to(merge.model.get_parameter(other).dtype))
    files.finish()
    return merge.model


def own(model: PreTrainedModel, weights: Tensors) -> Tensors:
    return {name: weights[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_plain_peft_and_for_the_merged_model_plain_transformers_give_the_trained_model_back(bases, tmp_path, name, settings):
    model, check, weights = trained(bases, name, settings)
    skeleton = copy_on_meta(model)
    write_adapter(tmp_path, skeleton, own(model, weights), hash_base(model))
    compare_adapter(tmp_path, skeleton, own(model, weights))
    compare_logits(check, load_adapter(tmp_path, skeleton, CPU), tmp_path, torch.float32)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["task_type"] == ("SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM")
    # Sets have another order in every process, and a resumed run must not write another file.
    assert all(found is None or found == sorted(found) for found in (written["target_modules"], written["modules_to_save"]))
    auto = AutoPeftModelForSeq2SeqLM if name == "t5" else AutoPeftModelForCausalLM
    torch.testing.assert_close(logits(auto.from_pretrained(str(tmp_path)), forward_inputs(model)), check["logits"])
    # Merged.
    (folder := tmp_path / "merged").mkdir()
    merged = write_merged(folder, model, weights)
    compare_logits(check, reload(merged, folder, CPU), folder, torch.float32)
    plain = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    whole, report = plain.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(whole) is type(load_base(bases / name, name))
    torch.testing.assert_close(logits(whole, forward_inputs(model)), check["logits"], rtol=1e-4, atol=1e-5)


def test_the_merged_model_has_the_dtype_of_the_base(bases, tmp_path):
    model, check, weights = trained(bases, "llama", {"modules_to_save": ["lm_head"]})
    in_bf16 = {n: w if n in own(model, weights) else w.to(torch.bfloat16) for n, w in weights.items()}
    for name, parameter in model.named_parameters():
        parameter.data = in_bf16[name]
    # It is added in fp32, and rounded once.
    layer = model.get_submodule(name := "model.layers.0.mlp.up_proj")
    base_weight, lora_a, lora_b = (parameter.detach() for parameter in layer.parameters())
    one = Merge(copy_on_meta(model), own(model, weights)).merged(f"{name}.base_layer.weight", base_weight)
    torch.testing.assert_close(one[1], base_weight.float() + 2 * lora_b @ lora_a, rtol=1e-6, atol=1e-7)
    merged = write_merged(tmp_path, model, in_bf16)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert coarsest(merged, torch.float32) == torch.bfloat16
    compare_logits(check, reload(merged, tmp_path, CPU), tmp_path, torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def export(bases: Path, model: PreTrainedModel, places: ExportPaths, tokenizer=None, **origin) -> None:
    """`export_model` of an adapted "llama"."""
    overrides = {"model.name_or_path": str(bases / "llama"), "data.source": "x", "train.max_steps": 1, "adapter.method": "lora"}
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])
    data = EvaluationRows(rows, tokenizer or _build_tokenizer(("<pad>", "</s>")), CausalCollator(0), Causal())
    export_model(load_config("llm", overrides=overrides), shard_model(one_process(), model), data, Origin(**origin), places)


def test_an_adapter_in_another_dtype_is_compared_as_coarsely(bases, tmp_path, capsys):
    """Of a run in fp32: by its tolerance, weights that were rounded would count as wrong."""
    model, _, weights = trained(bases, "llama", {})
    export(bases, model, ExportPaths(adapter=tmp_path / "export", dtype=torch.bfloat16))
    stored = load_file(tmp_path / "export" / "adapter_model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16} and len(stored) == len(own(model, weights))
    captured = capsys.readouterr()
    assert "rounded " in captured.out and "differ" not in captured.out + captured.err


def test_the_base_that_a_run_has_hashed_is_neither_gathered_nor_hashed_again(bases, tmp_path):
    model, _, weights = trained(bases, "llama", {"modules_to_save": ["lm_head"]})
    expected = hash_base(model)
    cast_frozen(model, torch.bfloat16)
    in_fp32 = model.get_submodule("model.norm")
    in_fp32.to(torch.float32)  # as a LayerNorm is kept
    hashes, gathered = hash_frozen(model, state_readers(model.state_dict()))(), []
    with (
        patch.object(write, "hash_weight", wraps=write.hash_weight) as hash_weight,
        patch.object(Phase, "add", lambda _, num_bytes: gathered.append(num_bytes)),
    ):
        export(bases, model, ExportPaths(adapter=tmp_path / "export"), frozen_hashes=hashes)
    record = json.loads((tmp_path / "export" / BASE_FILE).read_text())
    assert record[BASE_HASHES] == expected
    (hashed,) = [call.args[0] for call in hash_weight.call_args_list]
    assert torch.equal(hashed, in_fp32.weight)
    assert sum(gathered) == sum(weight.nbytes for weight in (*own(model, weights).values(), in_fp32.weight))


def test_an_export_whose_tokenizer_does_not_load_is_refused(bases, tmp_path, monkeypatch):
    model, _, _ = trained(bases, "llama", {})
    tokenizer = _build_tokenizer(("<pad>", "</s>"))
    save = tokenizer.save_pretrained

    def save_half(folder: Path) -> None:
        save(folder)
        os.truncate(folder / "tokenizer.json", 100)

    monkeypatch.setattr(tokenizer, "save_pretrained", save_half)
    with pytest.raises(UserError, match=r"^transformers cannot load the tokenizer that was exported \(.+\): check the disk of "):
        export(bases, model, ExportPaths(adapter=tmp_path / "export"), tokenizer)
    assert not any(tmp_path.iterdir())


def test_what_was_not_written_right_is_found(bases, tmp_path):
    model, check, weights = trained(bases, "llama", {"target_modules": ["q_proj"]})
    skeleton = copy_on_meta(model)
    write_adapter(tmp_path, skeleton, own(model, weights), {})
    name = "model.layers.1.self_attn.q_proj.lora_B.default.weight"
    changed = {**own(model, weights), name: weights[name] + 1e-6}
    with pytest.raises(RuntimeError, match=f"{name} is not what was trained"):
        compare_adapter(tmp_path, skeleton, changed)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    save_file({key: tensor for key, tensor in stored.items() if "layers.1" not in key}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match="peft misses base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"):
        compare_adapter(tmp_path, skeleton, own(model, weights))
