"""Models whose experts are modules are found by their structure, whatever their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.support.model_folders import LLAMA_SIZES, T5_SIZES
from toolkit.errors import UserError
from toolkit.models.experts import check_experts, expert_counts

SWITCH = T5_SIZES | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
NLLB = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
}  # fmt: skip
LONGCAT = LLAMA_SIZES | {
    "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 1,
    "moe_topk": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip


def build(config: Any, auto_class: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_experts": 8}, {8}),
        ({"num_local_experts": 1, "text_config": {"hidden_size": 4}}, set()),
        ({"text_config": {"num_local_experts": 16}}, {16}),
        ({"ffn_config": {"moe_num_experts": 4}}, {4}),
        ({"num_experts": None, "n_routed_experts": 0}, set()),
    ],
)
def test_experts_are_counted_in_nested_configs_too(settings: dict[str, Any], expected: set[int]) -> None:
    model: Any = nn.Module()
    model.config = transformers.PreTrainedConfig(**settings)
    assert expert_counts(model) == expected


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (transformers.SwitchTransformersConfig(**SWITCH), r"encoder\.block\.1\.layer\.1\.mlp\.experts"),
        (transformers.NllbMoeConfig(**NLLB), r"model\.encoder\.layers\.1\.ffn\.experts"),
    ],
    ids=["switch", "nllb"],
)
def test_experts_that_are_modules_are_refused(config: Any, path: str) -> None:
    sentence = rf"^model.name_or_path here has 4 experts as separate modules \({path}\): a rank runs only those that its tokens "
    with pytest.raises(UserError, match=sentence):
        check_experts(build(config, AutoModelForSeq2SeqLM), "here")


@pytest.mark.parametrize(
    "config",
    [
        # As many blocks as experts; two MLPs a block that every token goes through.
        transformers.MixtralConfig(**LLAMA_SIZES, num_local_experts=2),
        transformers.LongcatFlashConfig(**LONGCAT),
        transformers.LlamaConfig(**LLAMA_SIZES),
    ],
    ids=["mixtral", "longcat_flash", "llama"],
)
def test_lists_of_modules_that_are_not_experts_are_taken(config: Any) -> None:
    check_experts(build(config), "here")
