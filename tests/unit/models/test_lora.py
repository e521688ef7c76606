"""Adapters in place on tiny models: what trains, what stays as it was, and every sentence of a refusal."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.families.kinds import kind_on_meta
from tests.support.adapter_models import (
    BASES,
    adapted,
    adapter_config,
    export_adapter,
    forward_inputs,
    load_base,
    logits,
    randomize,
    with_adapter,
)
from tests.support.refusals import refusal
from toolkit.config.schema import ExportConfig, ModelConfig
from toolkit.models.lora import add_adapter, check_adapter_config
from toolkit.models.lora_files import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, base_name


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", list(BASES))
def test_a_new_adapter_changes_nothing_but_what_trains_and_its_export_goes_on(bases, tmp_path, name, method):
    base = load_base(bases / name, name)
    expected, original = logits(base, inputs := forward_inputs(base)), dict(base.named_parameters())
    saved = ["lm_head"] if method == "rslora" and name != "t5" else []  # peft keeps no three tied embeddings
    model = adapted(bases / name, name, method=method, rank=3, alpha=5.0, modules_to_save=saved)
    assert type(model) is type(base)
    assert torch.equal(logits(model, inputs), expected) or method == "dora"
    torch.testing.assert_close(logits(model, inputs), expected)
    randomize(model)
    frozen = {base_name(n): p for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen.keys() == original.keys()
    assert all(torch.equal(frozen[n], original[n]) for n in original)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and ".modules_to_save." not in n]
    kinds = {re.search(r"lora_[A-Za-z_]+", n).group() for n in trained}
    assert kinds == {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if method == "dora" else set())
    assert not torch.allclose(logits(model, inputs), expected, atol=1e-3)
    folder = export_adapter(tmp_path / "adapter", model)
    again = adapted(bases / name, name, method=method, name_or_path=str(folder), rank=7, alpha=1.0, seed=9)
    assert torch.equal(logits(again, inputs), logits(model, inputs))
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].requires_grad == theirs[n].requires_grad for n in ours)
    export_adapter(tmp_path / "again", again)
    for file in (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


ATTENTION, TWO = {f"{name}_proj" for name in "qkvo"}, {"exclude_modules": ["mlp.up_proj", "q_proj"]}


@pytest.mark.parametrize(
    ("settings", "freeze", "layers", "ends"),
    [
        ({}, [], {"0", "1"}, ATTENTION | {"gate_proj", "up_proj", "down_proj"}),
        ({"target_modules": ["q_proj"]}, [], {"0", "1"}, {"q_proj"}),
        ({"target_modules": ".*(q|v)_proj"}, [], {"0", "1"}, {"q_proj", "v_proj"}),
        ({"exclude_modules": ".*mlp.*"}, [], {"0", "1"}, ATTENTION),
        (TWO, [r".*layers\.1\..*"], {"0"}, ATTENTION - {"q_proj"} | {"gate_proj", "down_proj"}),
    ],
)
def test_the_part_that_texts_pass_is_adapted_but_what_is_excluded_or_frozen(settings, freeze, layers, ends):
    """The others get no gradient from texts, which was found out after the weights had loaded."""
    model = kind_on_meta("gemma3")
    add_adapter(model, adapter_config(**settings), ModelConfig(name_or_path="m", freeze=freeze))
    names = {tuple(name.partition(".lora_A")[0].split(".")) for name, _ in model.named_parameters() if "lora_A" in name}
    assert {name[:3] for name in names} == {("model", "language_model", "layers")}
    assert ({name[3] for name in names}, {name[-1] for name in names}) == (layers, ends)


def test_alpha_and_dropout_are_those_of_the_config(bases):
    model = adapted(bases / "llama", "llama", alpha=2.5, dropout=0.5)
    assert model.get_submodule("model.layers.0.self_attn.q_proj").scaling == {"default": 2.5 / 4}
    randomize(model)
    expected = logits(model, inputs := forward_inputs(model))
    assert not torch.allclose(model.train()(**inputs).logits, expected, atol=1e-3), "nothing is dropped"


def test_what_trains_is_fp32_on_a_bf16_base(bases):
    base = load_base(bases / "gpt2", "gpt2").to(torch.bfloat16)
    norms = base.transformer.h[0].attn.c_attn.weight.detach().float().norm(dim=0)
    model = with_adapter(base, adapter_config(method="dora", modules_to_save=["ln_f"]))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    magnitudes = model.get_parameter("transformer.h.0.attn.c_attn.lora_magnitude_vector.default.weight")
    torch.testing.assert_close(magnitudes.detach(), norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "module", "saved"),
    [
        ("llama", "norm", ["model.norm"]),
        *(("llama_tied", module, ["model.embed_tokens", "lm_head"]) for module in ("embed_tokens", "lm_head")),
        ("gpt2", "wte", ["transformer.wte", "lm_head"]),
    ],
)
def test_modules_to_save_are_matched_at_a_dot_and_stay_tied(bases, name, module, saved):
    """peft alone would take `norm` for an end of `input_layernorm` too."""
    model = adapted(bases / name, name, modules_to_save=[module])
    copies = {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad and "lora_" not in n}
    assert list(copies) == [f"{of}.modules_to_save.default.weight" for of in saved] and len({*copies.values()}) == 1
    model(**forward_inputs(model)).logits.sum().backward()
    assert all(p.grad is not None for p in copies.values())


def test_go_on_from_an_adapter_of_plain_peft(bases, tmp_path):
    config = LoraConfig(r=2, target_modules=r".*\.[01]\..*(q|v)_proj", rank_pattern={"v_proj": 5}, init_lora_weights=False)
    theirs = get_peft_model(load_base(bases / "llama", "llama"), config)
    theirs.save_pretrained(str(tmp_path))
    ours = adapted(bases / "llama", "llama", name_or_path=str(tmp_path), dropout=0.1)
    assert torch.equal(logits(ours, inputs := forward_inputs(ours)), logits(theirs, inputs))
    assert ours.get_submodule("model.layers.0.self_attn.v_proj.lora_dropout.default").p == 0.1


def test_the_base_is_known_again_in_any_dtype(bases, tmp_path):
    folder = export_adapter(tmp_path / "adapter", adapted(bases / "gpt2", "gpt2", modules_to_save=["lm_head"]))
    base = load_base(bases / "gpt2", "gpt2")
    for dtype in (torch.float32, torch.bfloat16):
        with_adapter(base.to(dtype), adapter_config(name_or_path=str(folder)))
    with torch.no_grad():
        base.transformer.ln_f.weight[0] += 1
    said = refusal(with_adapter, base, adapter_config(name_or_path=str(folder)))
    assert "1 tensors differ, transformer.ln_f.weight the first" in said


def test_a_new_adapter_is_drawn_as_peft_draws_it_but_each_tensor_by_its_name(bases):
    model = adapted(bases / "llama", "llama", seed=3, target_modules=["q_proj", "embed_tokens"])
    drawn = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in drawn.items() if ".lora_A." in name}
    assert len({p.flatten()[0].item() for p in matrices.values()}) == len(matrices) == 2
    for weight in matrices.values():
        bound = weight.shape[1] ** -0.5  # of kaiming_uniform_ with a = sqrt(5)
        assert 0.8 * bound < weight.abs().max() <= bound
    (embedding,) = (p for name, p in drawn.items() if ".lora_embedding_B." in name)
    assert 0.7 < embedding.std() < 1.3
    assert all(p.count_nonzero() == 0 for name, p in drawn.items() if ".lora_B." in name or ".lora_embedding_A." in name)
    fewer = adapted(bases / "llama", "llama", seed=3, target_modules=["q_proj"])
    own = {name: p for name, p in fewer.named_parameters() if name in matrices}
    assert own.keys() == matrices.keys() and all(torch.equal(own[name], matrices[name]) for name in own)
    other = adapted(bases / "llama", "llama", seed=4, target_modules=["q_proj"])
    assert not any(torch.equal(p, own[name]) for name, p in other.named_parameters() if name in own)


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


def test_layers_that_peft_would_not_read_again_are_refused_until_they_are_left_out():
    """transformers renames `mlp.shared_expert.` in old Lagunas, as an expression that also finds the new name."""
    ends = [f"shared_experts.{end}_proj" for end in ("down", "gate", "up")]
    said = refusal(add_adapter, kind_on_meta("laguna"), adapter_config(), ModelConfig(name_or_path="base"))
    assert said == (
        "the adapter adapts layers that peft would not read from its file again, as transformers renames them in a laguna: "
        f"name {', '.join(ends)} in adapter.exclude_modules"
    )
    add_adapter(kind_on_meta("laguna"), adapter_config(exclude_modules=ends), ModelConfig(name_or_path="base"))
