"""Which models attend to packed rows by document, on which device, and what a run says of its attention."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.tiny_models import causal_skeleton
from toolkit.launch.accelerator import cudnn_attention
from toolkit.models.attention import describe_attention, warn_of_full_rows
from toolkit.models.patches.documents import choose_packed_attention
from toolkit.models.patches.masks import attends_by_document

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DENSE = "sdpa with a dense mask, which {}: no flash kernel, but the memory-efficient one"
BY_DOCUMENT = "sdpa, and packed rows document by document ({}): no mask, and no cost of full rows"


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_every_family_with_sdpa_attends_by_document(family):
    for device_type, settings in (("cpu", {}), ("cuda", {"attn_pdrop": 0.0} if family == "gpt2" else {})):
        model = causal_skeleton(family, **settings)
        why = choose_packed_attention(model, None, device_type, torch.bfloat16)
        assert attends_by_document(model) == (family != "gemma2")
        assert ("has no sdpa (a soft cap" in why) == (family == "gemma2")
        # What a checkpoint or an export says of it.
        assert model.config.to_dict() == causal_skeleton(family, **settings).config.to_dict()


@pytest.mark.parametrize(
    ("family", "settings", "changed", "reason"),
    [
        ("llama", {}, {"named": "sdpa"}, "model.attn_implementation is sdpa (leave it out"),
        ("llama", {}, {"dtype": torch.float32}, "bf16 and fp16 only"),
        ("llama", {}, {"is_one_graph": True}, "dynamo_use_fullgraph"),
        ("llama", {"attention_dropout": 0.1}, {}, "the model's is 0.1 (model.dropout 0"),
        ("gpt2", {}, {}, "the model's is 0.1 (model.dropout 0"),
        *(("llama", {"head_dim": size}, {}, f"head sizes of LlamaAttention ([{size}])") for size in (12, 512)),
        # Attention of its own, and heads of two sizes.
        *((family, {}, {}, "") for family in ("falcon", "bloom")),
        ("deepseek_v3", {"v_head_dim": 4}, {}, ""),
    ],
)
def test_other_packed_rows_get_a_dense_mask_and_the_reason_is_said(family, settings, changed, reason):
    model = causal_skeleton(family, **settings)
    asked = {"named": None, "dtype": torch.bfloat16, "is_one_graph": False} | changed
    why = choose_packed_attention(model, asked["named"], "cuda", asked["dtype"], is_one_graph=asked["is_one_graph"])
    assert why and reason in why
    assert not attends_by_document(model)
    assert why in str(warn_of_full_rows(model, why))


@pytest.mark.parametrize(("capability", "head_dim", "reason"), [((8, 0), 256, ""), ((7, 5), 64, "Ampere generation or later")])
def test_the_kernel_takes_its_oldest_gpu_and_its_largest_head(capability, head_dim, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    why = choose_packed_attention(causal_skeleton("llama", head_dim=head_dim), None, "cuda", torch.float16)
    assert reason in why if reason else why == ""


@pytest.mark.parametrize(
    ("name", "is_encoder_decoder", "packing", "dtype", "on_gpu", "on_cpu"),
    [
        ("sdpa", False, False, torch.bfloat16, "sdpa, the flash kernel", "sdpa"),
        ("sdpa", False, False, torch.float32, "sdpa in fp32: the memory-efficient kernel", "sdpa"),
        ("sdpa", False, True, torch.bfloat16, DENSE.format("keeps packed rows apart"), "sdpa"),
        ("sdpa", True, False, torch.bfloat16, DENSE.format("has padding or position biases"), "sdpa"),
        *((name, False, True, torch.bfloat16, name, name) for name in ("eager", "flex_attention", "flash_attention_2")),
        ("documents", False, True, torch.bfloat16, *map(BY_DOCUMENT.format, ("torch's varlen kernel", "one causal sdpa each"))),
    ],
)
def test_a_run_says_which_attention_kernel_runs(name, is_encoder_decoder, packing, dtype, on_gpu, on_cpu):
    model = torch.nn.Module()
    model.config = SimpleNamespace(_attn_implementation=name, is_encoder_decoder=is_encoder_decoder)
    with cudnn_attention(False):
        assert describe_attention(model, GPU, dtype, packing=packing) == on_gpu
    with cudnn_attention(True):
        assert describe_attention(model, GPU, dtype, packing=packing).removesuffix(" or cuDNN's") == on_gpu
    assert describe_attention(model, CPU, dtype, packing=packing) == on_cpu
    assert warn_of_full_rows(model, "") is None
    assert attends_by_document(model) == (name in ("documents", "flash_attention_2"))
