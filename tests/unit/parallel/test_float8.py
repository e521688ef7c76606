"""Which Linears train in float8, and what is missing where none can; without torchao."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.adapter_models import with_adapter
from toolkit.config.schema import AdapterConfig
from toolkit.errors import UserError
from toolkit.launch import environment
from toolkit.parallel import float8
from toolkit.parallel.units import repeated_blocks


def tiny_llama(hidden_size: int = 32) -> nn.Module:
    import transformers

    sizes = {"hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))


def test_linears_of_blocks_are_chosen_but_for_the_first() -> None:
    model = tiny_llama()
    chosen = float8.choose_linears(model, repeated_blocks(model), num_shards=2)
    assert len(chosen) == 2 * 7 - 1 and "model.layers.0.self_attn.q_proj" not in chosen and "lm_head" not in chosen
    assert all(model.get_submodule(name) is linear for name, linear in chosen.items())


def test_frozen_ones_and_those_of_other_sizes_stay_in_bf16() -> None:
    model = tiny_llama()
    model.get_submodule("model.layers.0").requires_grad_(False)
    chosen = float8.choose_linears(model, repeated_blocks(model), num_shards=2)
    assert len(chosen) == 7 and all(name.startswith("model.layers.1.") for name in chosen)
    # 48 rows over 32 ranks, 16 rows of the one key head over 32: neither is shared equally.
    chosen = float8.choose_linears(model, repeated_blocks(model), num_shards=32)
    assert sorted(name.rpartition(".")[2] for name in chosen) == ["down_proj", "o_proj", "q_proj"]


def test_an_adapter_and_a_model_without_one_are_refused() -> None:
    model = tiny_llama(hidden_size=24)
    with pytest.raises(UserError, match=r"none of the 15 Linears of LlamaForCausalLM can be converted: .* sizes that 16 divides"):
        float8.choose_linears(model, repeated_blocks(model), num_shards=2)
    model = with_adapter(tiny_llama(), AdapterConfig(method="lora"))
    with pytest.raises(UserError, match="mixed_precision is fp8 with an adapter: .* adapter.method none"):
        float8.choose_linears(model, repeated_blocks(model), num_shards=2)


def test_the_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torchao is not installed: run pip install 'torchao>="):
        environment.check_torchao()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a CUDA GPU of compute capability 8.9 .* torch sees none: write bf16"):
        environment.check_capability()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match="capability 8.9 .*; NVIDIA A100 has 8.0: write bf16"):
        environment.check_capability()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    environment.check_capability()
