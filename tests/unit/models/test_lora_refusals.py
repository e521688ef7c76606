"""Every sentence with which an adapter is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.kinds import kind_on_meta
from tests.support.adapter_models import adapted, adapter_config, export_adapter, randomize
from tests.support.refusals import refusal
from toolkit.config.schema import ExportConfig, ModelConfig
from toolkit.launch.accelerator import check_trained_dtype, frozen_dtype
from toolkit.models.lora import add_adapter, check_adapter_config
from toolkit.models.lora_files import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE


@pytest.fixture(scope="module")
def exported(bases: Path, tmp_path_factory) -> Path:
    """A trained adapter of the untied Llama."""
    model = adapted(bases / "llama", "llama", rank=3, alpha=5.0, target_modules=["q_proj", "down_proj"])
    randomize(model)
    return export_adapter(tmp_path_factory.mktemp("adapters") / "llama", model)


LINEAR = "linear ones end in: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("llama", {"target_modules": ["q_proj", "query"]},
         f"adapter.target_modules query matches no module; {LINEAR}"),
        ("llama", {"target_modules": "(q_proj"},
         "adapter.target_modules '(q_proj' is not a regular expression (missing ), unterminated subpattern at position 0)"),
        ("llama", {"target_modules": ["q_proj"], "exclude_modules": ".*attn.*"},
         f"adapter.target_modules q_proj matches no module besides {Q_PROJ}, which adapter.exclude_modules or model.freeze "
         "names, or no text passes; linear ones end in: "),
        ("llama", {"exclude_modules": ["q_proj", "query"]},
         "adapter.exclude_modules ['q_proj', 'query'] matches no module: name one that there is, or leave it out"),
        ("gpt2", {"target_modules": "q_proj"},
         "adapter.target_modules q_proj matches no module; linear ones end in: c_attn, c_fc, c_proj, lm_head"),
        ("llama", {"target_modules": ["self_attn"]},
         "adapter.target_modules self_attn matches model.layers.0.self_attn, a LlamaAttention, but an adapter goes on linear "
         f"layers and embeddings; {LINEAR}"),
        ("gpt2", {"modules_to_save": ["embed_tokens"]},
         "adapter.modules_to_save embed_tokens matches no module; ends of names that exist: attn, c_attn, c_fc, c_proj, h, "
         "lm_head, ln_1, ln_2, ln_f, mlp, transformer, wpe, wte"),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]},
         f"adapter.target_modules q_proj matches {Q_PROJ}, which adapter.modules_to_save trains whole: choose one"),
        ("llama_tied", {"target_modules": ["lm_head"]},
         "the adapter adapts lm_head.weight, which is one tied weight with model.embed_tokens.weight: the merged model would "
         "need two; leave it out of adapter.target_modules, or train it whole by adapter.modules_to_save"),
        ("t5", {"modules_to_save": ["shared"]},
         "the adapter trains shared.weight, which is one tied weight with encoder.embed_tokens.weight and "
         "decoder.embed_tokens.weight and lm_head.weight: peft keeps only a token embedding and an output head together"),
        ("t5", {"modules_to_save": ["encoder"]},
         "trains encoder.embed_tokens.weight, which is one tied weight with shared.weight"),
    ],
)  # fmt: skip
def test_new_adapters_that_are_refused(bases, name, settings, sentence):
    assert sentence in refusal(adapted, bases / name, name, **settings)


def changed(*, weights=None, **settings):
    """With other settings, or with `weights` done to its tensors."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | settings))
        if weights:
            save_file(weights(load_file(folder / WEIGHTS_FILE)), folder / WEIGHTS_FILE)

    return change


def with_tensor(name: str, *shape: int):
    return lambda tensors: tensors | {f"base_model.model.{name}": torch.zeros(shape)}


def without(name: str):
    """With its bytes under the name of pickled weights."""
    return lambda folder: (folder / name).rename(folder / "adapter_model.bin")


def with_bytes(name: str):
    return lambda folder: (folder / name).write_bytes(b"\x80{")


GIVEN = "adapter.name_or_path {folder}"
NO_FILE, NO_FIT = GIVEN + " cannot be read ({folder} does not appear to have a file named ", GIVEN + " does not fit {base}: "


@pytest.mark.parametrize(
    ("name", "change", "settings", "sentence"),
    [
        ("llama", changed(), {"method": "dora"},
         f"{GIVEN} is a lora adapter, but adapter.method is dora: set adapter.method lora"),
        ("llama", changed(peft_type="IA3"), {},
         f"{GIVEN} is an adapter of type IA3, and only LoRA, rsLoRA and DoRA are supported"),
        ("llama", changed(init_lora_weights="pissa"), {}, f"{GIVEN} began with init_lora_weights pissa, which changes"),
        ("llama", changed(of_tomorrow=True), {},
         f"{GIVEN} has of_tomorrow True in its adapter_config.json, which is not supported"),
        ("llama", changed(layers_pattern="h"), {}, f"peft refuses the {CONFIG_FILE} of {GIVEN}: When `layers_pattern`"),
        ("gpt2", changed(), {}, f"{NO_FIT}Target modules down_proj, q_proj not found in the base model. Please check the "),
        ("llama", changed(weights=lambda tensors: {n: t for n, t in tensors.items() if not n.endswith("q_proj.lora_B.weight")}),
         {}, f"{NO_FIT}it lacks {Q_PROJ}.lora_B.weight"),
        ("llama", changed(weights=with_tensor("model.layers.5.mlp.up_proj.lora_A.weight", 1)), {},
         f"{NO_FIT}it also has model.layers.5.mlp.up_proj.lora_A.weight"),
        ("llama", changed(weights=with_tensor(f"{Q_PROJ}.lora_A.weight", 3, 8)), {},
         f"{NO_FIT}it has {Q_PROJ}.lora_A.weight of shape (3, 8) instead of (3, 16)"),
        ("llama_tied", changed(modules_to_save=["embed_tokens"], weights=with_tensor("model.embed_tokens.weight", 64, 16)), {},
         f"{GIVEN} trains model.embed_tokens.weight, which is one tied weight with lm_head.weight: peft keeps only"),
        *(("llama", without(file), {}, NO_FILE + file) for file in (CONFIG_FILE, WEIGHTS_FILE)),
        *(("llama", with_bytes(file), {}, f"the {file} of {GIVEN} cannot be read: ") for file in (CONFIG_FILE, BASE_FILE)),
        ("llama", with_bytes(WEIGHTS_FILE), {}, f"{WEIGHTS_FILE} of {GIVEN} cannot be read as safetensors ("),
    ],
)  # fmt: skip
def test_folders_that_are_refused(bases, exported, tmp_path, name, change, settings, sentence):
    folder = shutil.copytree(exported, tmp_path / "adapter", ignore=shutil.ignore_patterns(BASE_FILE))
    change(folder)
    said = refusal(adapted, bases / name, name, name_or_path=str(folder), **settings)
    assert said.startswith(sentence.format(folder=folder, base=bases / name))


def test_neither_a_folder_nor_on_the_hub(bases, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal(adapted, bases / "llama", "llama", name_or_path="no/such")
    assert said.startswith("adapter.name_or_path no/such cannot be read ") and "give a folder, or a hub id within" in said


NONE, SAVED = "but adapter.method is none: set adapter.method", "adapter.modules_to_save"
NO_EXPERTS = "adapter.experts is true, and peft has no {} for experts: set dropout 0, lora or rslora"
NOT_THE_WEIGHTS = ", but an adapter belongs to the weights of model.name_or_path: give an exported model there"


@pytest.mark.parametrize(
    ("adapter", "model", "sentence"),
    [
        ({"method": "none", "name_or_path": "a"}, {}, f"adapter.name_or_path is a, {NONE}, or leave adapter.name_or_path out"),
        ({"method": "none"}, {}, f"export.merge is true, {NONE}, or leave export.merge out"),
        ({"experts": True, "dropout": 0.1}, {}, NO_EXPERTS.format("adapter.dropout 0.1")),
        ({"experts": True, "method": "dora"}, {}, NO_EXPERTS.format("adapter.method dora")),
        ({}, {"from_scratch": True}, f"adapter.method is lora and model.from_scratch true{NOT_THE_WEIGHTS}"),
        ({}, {"init_from": "runs/a"}, f"adapter.method is lora and model.init_from runs/a{NOT_THE_WEIGHTS}"),
        ({"modules_to_save": ["b"]}, {"freeze": ["a"]}, f"model.freeze is ['a'] and {SAVED} ['b']: give one of them"),
    ],
)
def test_settings_that_exclude_each_other(adapter, model, sentence):
    model_config = ModelConfig(name_or_path="m", **model)
    config = SimpleNamespace(adapter=adapter_config(**adapter), model=model_config, export=ExportConfig(merge=True))
    assert refusal(check_adapter_config, config) == sentence


@pytest.mark.parametrize(
    ("kind", "version", "precision", "reason"),
    [
        ("FSDP", 1, "bf16", "FSDP1 flattens weights"),
        ("MULTI_GPU", None, "bf16", "DDP would reduce gradients in bf16"),
        ("FSDP", 2, "fp8", "mixed_precision is fp8"),
        ("NO", None, "no", "mixed_precision is 'no'"),
        ("NO", None, "bf16", ""),
        ("FSDP", 2, "no", ""),
    ],
)
def test_where_frozen_and_trained_weights_are_kept_in_bf16(kind, version, precision, reason):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=state, mixed_precision=precision)
    check_trained_dtype(accelerator, "float32")
    if version == 1:
        sentence = "model.frozen_dtype is bfloat16, but FSDP1 keeps frozen and trainable parameters"
        assert refusal(frozen_dtype, accelerator, "bfloat16", has_adapter=True).startswith(sentence)
    if not reason:
        return check_trained_dtype(accelerator, "bfloat16_stochastic")
    sentence = f"model.trained_dtype is bfloat16_stochastic, but {reason}: take one process with mixed_precision: bf16, or FSDP2"
    assert refusal(check_trained_dtype, accelerator, "bfloat16_stochastic").startswith(sentence)


def test_layers_that_peft_would_not_read_again_are_refused_until_they_are_left_out():
    """transformers renames `mlp.shared_expert.` in old Lagunas, as an expression that also finds the new name."""
    ends = [f"shared_experts.{end}_proj" for end in ("down", "gate", "up")]
    said = refusal(add_adapter, kind_on_meta("laguna"), adapter_config(), ModelConfig(name_or_path="base"))
    assert said == (
        "the adapter adapts layers that peft would not read from its file again, as transformers renames them in a laguna: "
        f"name {', '.join(ends)} in adapter.exclude_modules"
    )
    add_adapter(kind_on_meta("laguna"), adapter_config(exclude_modules=ends), ModelConfig(name_or_path="base"))
