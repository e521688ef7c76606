"""Adapters in place on tiny models: what trains, what stays as it was, and every sentence of a refusal."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model

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
from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError
from toolkit.models.lora import add_adapter
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
    with pytest.raises(UserError, match="1 tensors differ, transformer.ln_f.weight the first"):
        with_adapter(base, adapter_config(name_or_path=str(folder)))


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
