"""Which models attend to packed rows by document, on which device, and what a run says of its attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.model_folders import CAUSAL_FAMILIES
from toolkit.launch.accelerator import cudnn_attention
from toolkit.models.attention import describe_attention, warn_of_full_rows
from toolkit.models.patches.documents import attends_by_document, choose_packed_attention

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DENSE = "sdpa with a dense mask, which {}: no flash kernel, but the memory-efficient one"
BY_DOCUMENT = "sdpa, and packed rows document by document ({}): no mask, and no cost of full rows"


def build(family: str, **settings: Any) -> Any:
    import transformers

    config_class, sizes = CAUSAL_FAMILIES[family]
    config = getattr(transformers, config_class)(vocab_size=256, **{**sizes, **settings})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_every_family_with_sdpa_attends_by_document(family: str) -> None:
    for device_type, settings in (("cpu", {}), ("cuda", {"attn_pdrop": 0.0} if family == "gpt2" else {})):
        model = build(family, **settings)
        why = choose_packed_attention(model, None, device_type, torch.bfloat16)
        assert attends_by_document(model) == (family != "gemma2")
        assert ("has no sdpa (a soft cap" in why) == (family == "gemma2")
        assert model.config.to_dict() == build(family, **settings).config.to_dict()  # what a checkpoint or export says of it


@pytest.mark.parametrize(
    ("family", "settings", "named", "dtype", "is_one_graph", "reason"),
    [
        ("llama", {}, "sdpa", torch.bfloat16, False, "model.attn_implementation is sdpa (leave it out"),
        ("llama", {}, None, torch.float32, False, "bf16 and fp16 only"),
        ("llama", {}, None, torch.bfloat16, True, "dynamo_use_fullgraph"),
        ("llama", {"attention_dropout": 0.1}, None, torch.bfloat16, False, "the model's is 0.1 (model.dropout 0"),
        ("gpt2", {}, None, torch.bfloat16, False, "the model's is 0.1 (model.dropout 0"),
        ("llama", {"head_dim": 12}, None, torch.bfloat16, False, "head sizes of LlamaAttention ([12])"),
        ("llama", {"head_dim": 512}, None, torch.bfloat16, False, "head sizes of LlamaAttention ([512])"),
    ],
)
def test_other_packed_rows_get_a_dense_mask_and_the_reason_is_said(
    family: str, settings: dict[str, Any], named: str | None, dtype: torch.dtype, is_one_graph: bool, reason: str
) -> None:
    model = build(family, **settings)
    why = choose_packed_attention(model, named, "cuda", dtype, is_one_graph=is_one_graph)
    assert reason in why
    assert not attends_by_document(model)
    assert why in str(warn_of_full_rows(model, why))


@pytest.mark.parametrize(("capability", "head_dim", "reason"), [((8, 0), 256, ""), ((7, 5), 64, "Ampere generation or later")])
def test_the_kernel_takes_its_oldest_gpu_and_its_largest_head(
    capability: tuple[int, int], head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    why = choose_packed_attention(build("llama", head_dim=head_dim), None, "cuda", torch.float16)
    assert reason in why if reason else why == ""


@pytest.mark.parametrize(("config_class", "sizes"), [("FalconConfig", {}), ("BloomConfig", {}), ("DeepseekV3Config", {})])
def test_attention_of_its_own_and_heads_of_two_sizes_keep_the_mask(config_class: str, sizes: dict[str, int]) -> None:
    import transformers

    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 256}
    model: Any
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**settings))
    assert choose_packed_attention(model, None, "cuda", torch.bfloat16)
    assert not attends_by_document(model)


@pytest.mark.parametrize(
    ("name", "is_encoder_decoder", "packing", "dtype", "on_gpu", "on_cpu"),
    [
        ("sdpa", False, False, torch.bfloat16, "sdpa, the flash kernel", "sdpa"),
        ("sdpa", False, False, torch.float32, "sdpa in fp32: the memory-efficient kernel", "sdpa"),
        ("sdpa", False, True, torch.bfloat16, DENSE.format("keeps packed rows apart"), "sdpa"),
        ("sdpa", True, False, torch.bfloat16, DENSE.format("has padding or position biases"), "sdpa"),
        ("eager", False, True, torch.bfloat16, "eager", "eager"),
        ("flex_attention", False, True, torch.bfloat16, "flex_attention", "flex_attention"),
        ("flash_attention_2", False, True, torch.bfloat16, "flash_attention_2", "flash_attention_2"),
        (
            "documents", False, True, torch.bfloat16, BY_DOCUMENT.format("torch's varlen kernel"),
            BY_DOCUMENT.format("one causal sdpa each"),
        ),
    ],
)  # fmt: skip
def test_a_run_says_which_attention_kernel_runs(
    name: str, is_encoder_decoder: bool, packing: bool, dtype: torch.dtype, on_gpu: str, on_cpu: str
) -> None:  # fmt: skip
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name, is_encoder_decoder=is_encoder_decoder))
    with cudnn_attention(False):
        assert describe_attention(model, GPU, dtype, packing=packing) == on_gpu
    with cudnn_attention(True):
        assert describe_attention(model, GPU, dtype, packing=packing).removesuffix(" or cuDNN's") == on_gpu
    assert describe_attention(model, CPU, dtype, packing=packing) == on_cpu
    assert warn_of_full_rows(model, "") is None
    assert attends_by_document(model) == (name in ("documents", "flash_attention_2"))
