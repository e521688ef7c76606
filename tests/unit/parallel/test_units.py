"""Shard units on models as they are, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

from toolkit.errors import UserError
from toolkit.parallel.gather import assign_parameters
from toolkit.parallel.units import build_units, check_ties, find_blocks, find_ends
from toolkit.parallel.wrap import check_wrap, copy_on_meta


def fsdp_plugin(policy: object, class_names: list[str] | None = None, min_num_params: int = 0) -> SimpleNamespace:
    return SimpleNamespace(auto_wrap_policy=policy, transformer_cls_names_to_wrap=class_names, min_num_params=min_num_params)


def tiny_t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, tie_word_embeddings=True
    )
    return T5ForConditionalGeneration(config)


def tiny_llama(tie_word_embeddings: bool = False) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tie_word_embeddings))


def test_blocks_come_from_the_model_where_the_yaml_names_none() -> None:
    blocks = find_blocks(fsdp_plugin(transformer_auto_wrap_policy), tiny_t5())
    assert list(blocks) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_blocks_are_inferred_where_the_model_names_none_either() -> None:
    config = PegasusConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    model = PegasusForConditionalGeneration(config)
    model._no_split_modules = []
    blocks = find_blocks(fsdp_plugin(transformer_auto_wrap_policy), model)
    assert sorted(blocks) == [f"model.{side}.layers.{i}" for side in ("decoder", "encoder") for i in range(2)]


def test_an_unknown_wrap_class_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"names T6Block, which is not in T5ForConditionalGeneration; .* T5Block"):
        find_blocks(fsdp_plugin(transformer_auto_wrap_policy, ["T6Block"]), tiny_t5())


@pytest.mark.parametrize(
    ("class_name", "sentence"),
    [
        ("Linear", "names Linear, which makes lm_head a shard unit of its own, but the loss calls it once for each chunk"),
        ("LlamaForCausalLM", "names LlamaForCausalLM, which is the full model"),
    ],
)
def test_a_class_whose_units_ranks_would_wait_for_is_refused(class_name: str, sentence: str) -> None:
    model = tiny_llama()
    with pytest.raises(UserError, match=sentence):
        find_blocks(fsdp_plugin(transformer_auto_wrap_policy, ["LlamaDecoderLayer", class_name]), model)
    blocks = find_blocks(fsdp_plugin(transformer_auto_wrap_policy, ["LlamaAttention", "LlamaMLP", "Embedding"]), model)
    assert len(blocks) == 5, "what lies in the backbone is called alike on every rank"


def test_a_class_that_parts_tied_weights_is_refused_before_weights_load() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    plugin = fsdp_plugin(transformer_auto_wrap_policy, ["LlamaDecoderLayer", "Embedding"])
    plugin.fsdp_version = 2
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"), state=state, mixed_precision="bf16")
    with pytest.raises(
        UserError, match=r"model.embed_tokens.weight and lm_head.weight are one tied weight, but lie in different"
    ):
        check_wrap(accelerator, copy_on_meta(model))


def test_the_head_of_an_encoder_decoder_is_no_unit_either() -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, tie_word_embeddings=False)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(UserError, match="makes lm_head a shard unit of its own"):
        find_blocks(fsdp_plugin(transformer_auto_wrap_policy, ["T5Block", "Linear"]), model)
    assert len(find_blocks(fsdp_plugin(transformer_auto_wrap_policy, ["T5Block", "T5LayerNorm"]), model)) == 6


def test_size_based_wrap_takes_no_module_list_and_counts_no_parameter_twice() -> None:
    model = tiny_t5()
    blocks = find_blocks(fsdp_plugin(size_based_auto_wrap_policy, min_num_params=1500), model)
    assert blocks
    assert not any(isinstance(module, nn.ModuleList) for module in blocks.values())
    units = build_units(model, blocks)
    assert sum(unit.num_parameters for unit in units) == sum(p.numel() for p in model.parameters())
    for unit in units[:-1]:
        assert unit.num_parameters >= 1500


@pytest.mark.parametrize("min_num_params", [1, 500, 1000, 2000, 5000])
def test_size_based_wrap_keeps_tied_weights_in_the_root(min_num_params: int) -> None:
    """The embedding alone has 1024 parameters, and the encoder with it more than any size here."""
    model = tiny_t5()
    blocks = find_blocks(fsdp_plugin(size_based_auto_wrap_policy, min_num_params=min_num_params), model)
    assert not {"shared", "lm_head", "encoder", "decoder", "encoder.embed_tokens", "decoder.embed_tokens"} & set(blocks)
    units = build_units(model, blocks)
    check_ties(model, units)
    assert "shared.weight" in units[-1].parameter_names
    assert all(unit.num_parameters >= min_num_params for unit in units[:-1])
    assert bool(blocks) == (min_num_params < 5000)


def test_size_based_wrap_takes_no_output_head_for_a_block() -> None:
    """It is a unit whatever its size, and stays gathered between forward and backward."""
    model = tiny_t5()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    blocks = find_blocks(fsdp_plugin(size_based_auto_wrap_policy, min_num_params=1000), model)
    assert model.lm_head.weight.numel() >= 1000 and blocks and "lm_head" not in blocks


def test_size_based_wrap_goes_up_to_the_module_that_holds_all_of_a_tied_weight() -> None:
    inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    inner[0].weight = inner[1].weight
    model = nn.Sequential(inner, nn.Linear(8, 8, bias=False), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    blocks = find_blocks(fsdp_plugin(size_based_auto_wrap_policy, min_num_params=40), model)
    assert list(blocks) == ["0", "1"], "the pair of tied layers, once 64; the layer of 64; neither the list of 40 nor its layers"
    check_ties(model, build_units(model, blocks))


def test_tied_weights_lie_in_the_root_and_count_once() -> None:
    model = tiny_t5()
    blocks = find_blocks(fsdp_plugin(transformer_auto_wrap_policy), model)
    units = build_units(model, blocks)
    check_ties(model, units)
    assert [name for name in units[-1].parameter_names if "embed" in name or "shared" in name] == ["shared.weight"]


def test_untied_embedding_and_head_are_units_of_their_own() -> None:
    llama, tied, plugin = tiny_llama(), tiny_llama(tie_word_embeddings=True), fsdp_plugin(transformer_auto_wrap_policy)
    ends = find_ends(llama, blocks := find_blocks(plugin, llama))
    assert list(ends) == ["model.embed_tokens", "lm_head"]
    units = build_units(llama, blocks | ends)
    check_ties(llama, units)
    assert units[-1].parameter_names == ("model.norm.weight",)
    assert find_ends(tied, find_blocks(plugin, tied)) == find_ends(tiny_t5(), find_blocks(plugin, tiny_t5())) == {}
    assert find_ends(llama, {}) == {}, "nothing is wrapped"
    t5 = tiny_t5()  # as its later versions: the stacks share the embedding
    t5.lm_head.weight = nn.Parameter(t5.lm_head.weight.detach().clone())
    assert list(find_ends(t5, find_blocks(plugin, t5))) == ["lm_head"]


def test_a_weight_tied_across_units_is_refused() -> None:
    model = tiny_t5()
    model.encoder.block[1].layer[1].DenseReluDense.wi.weight = model.encoder.block[0].layer[1].DenseReluDense.wi.weight
    units = build_units(model, find_blocks(fsdp_plugin(transformer_auto_wrap_policy), model))
    with pytest.raises(UserError, match=r"encoder.block.0.*wi.weight and encoder.block.1.*wi.weight are one tied weight"):
        check_ties(model, units)


def test_a_weightless_copy_has_ties_and_takes_weights() -> None:
    model = tiny_t5()
    model.lm_head.weight.requires_grad_(False)
    copy = copy_on_meta(model)
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert copy.lm_head.weight is copy.shared.weight is copy.encoder.embed_tokens.weight
    assert not copy.shared.weight.requires_grad
    assert next(model.parameters()).device.type == "cpu"
    assign_parameters(copy, {name: p.detach().clone() for name, p in model.named_parameters()})
    ids = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        model.eval(), copy.eval()
        assert torch.equal(copy(input_ids=ids, decoder_input_ids=ids).logits, model(input_ids=ids, decoder_input_ids=ids).logits)
