"""Which models attend to packed rows by document, on which device, and what a run says of its attention. What a loss does not
reach is found without weights, and is what real weights get no gradient for."""

import hashlib
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.families.kinds import kind_on_meta, kinds, tiny_config
from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.refusals import refusal
from tests.support.tiny_models import causal_skeleton
from toolkit.launch.accelerator import cudnn_attention
from toolkit.models.freeze import find_uncalled, find_unreached, hash_tensor
from toolkit.models.patches.documents import choose_packed_attention, describe_attention, warn_of_full_rows
from toolkit.models.patches.masks import attends_by_document

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
        ("llama", {}, {"capability": (7, 5)}, "Ampere generation or later"),
        ("llama", {"attention_dropout": 0.1}, {}, "the model's is 0.1 (model.dropout 0"),
        ("gpt2", {}, {}, "the model's is 0.1 (model.dropout 0"),
        *(("llama", {"head_dim": size}, {}, f"head sizes of LlamaAttention ([{size}])") for size in (12, 512)),
        # Attention of its own, and heads of two sizes.
        *((family, {}, {}, "") for family in ("falcon", "bloom")),
        ("deepseek_v3", {"v_head_dim": 4}, {}, ""),
        # The oldest GPU and the largest head that the kernel takes.
        ("llama", {"head_dim": 256}, {"dtype": torch.float16}, None),
    ],
)
def test_other_packed_rows_get_a_dense_mask_and_the_reason_is_said(family, settings, changed, reason, monkeypatch):
    model = causal_skeleton(family, **settings)
    asked = {"named": None, "dtype": torch.bfloat16, "is_one_graph": False, "capability": (8, 0)} | changed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: asked["capability"])
    why = choose_packed_attention(model, asked["named"], "cuda", asked["dtype"], is_one_graph=asked["is_one_graph"])
    assert attends_by_document(model) == (why == "") == (reason is None)
    if why:
        assert reason in why and why in str(warn_of_full_rows(model, why))


@pytest.mark.parametrize(
    ("name", "is_encoder_decoder", "packing", "dtype", "on_gpu"),
    [
        ("sdpa", False, False, torch.bfloat16, "sdpa, the flash kernel"),
        ("sdpa", False, False, torch.float32, "sdpa in fp32: the memory-efficient kernel"),
        ("sdpa", False, True, torch.bfloat16, "sdpa with a dense mask, which keeps packed rows apart: no flash kernel"),
        ("sdpa", True, False, torch.bfloat16, "sdpa with a dense mask, which has padding or position biases: no flash kernel"),
        *((name, False, True, torch.bfloat16, name) for name in ("eager", "flex_attention", "flash_attention_2")),
        ("documents", False, True, torch.bfloat16, BY_DOCUMENT.format("torch's varlen kernel")),
    ],
)
def test_a_run_says_which_attention_kernel_runs(name, is_encoder_decoder, packing, dtype, on_gpu):
    model = torch.nn.Module()
    model.config = SimpleNamespace(_attn_implementation=name, is_encoder_decoder=is_encoder_decoder)
    for has_cudnn in (False, True):
        with cudnn_attention(has_cudnn):
            said = describe_attention(model, torch.device("cuda", 0), dtype, packing=packing)
        is_taken = has_cudnn and name == "sdpa" and dtype == torch.bfloat16
        assert said.startswith(on_gpu) and said.endswith(" or cuDNN's") == is_taken
    on_cpu = BY_DOCUMENT.format("one causal sdpa each") if name == "documents" else name
    assert describe_attention(model, torch.device("cpu"), dtype, packing=packing) == on_cpu
    assert warn_of_full_rows(model, "") is None
    assert attends_by_document(model) == (name in ("documents", "flash_attention_2"))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("led", "query_global"),
        ("deepseek_v32", "indexer.wk"),
        ("deepseek_v4", "indexer."),
        ("gemma3", "vision_tower"),
        ("mistral3", "multi_modal_projector"),
        ("t5gemma2", "eoi_embedding"),
        ("qwen2_5_vl", "visual.blocks"),
        ("qwen4_exp_text", "indexer."),
        ("llama", ""),
        ("mamba", ""),
        ("bart", ""),
    ],
)
def test_unreached_parameters_are_those_without_a_gradient(kind, part):
    found = find_unreached(kind_on_meta(kind))
    config = tiny_config(kind)
    model = getattr(transformers, kinds()[kind]).from_config(config).eval()
    tokens = torch.randint(3, 256, (1, 64 if kind == "led" else 128))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
    model(**inputs, use_cache=False).logits.sum().backward()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    assert found == [name for name, gradient in trained if gradient is None or not gradient.any()]
    assert any(part in name for name in found) if part else not found


def test_what_a_models_own_code_freezes_gets_no_adapter():
    found = find_unreached(kind_on_meta("blt"))
    assert found and all(name.startswith("model.patcher.") for name in found)


@pytest.mark.parametrize(("kind", "reason"), [("blip", "'pixel_values'"), ("diffusion_gemma", "its forward takes no labels")])
def test_a_model_that_needs_images_is_refused_before_its_weights_load(kind, reason):
    said = refusal(find_unreached, kind_on_meta(kind))
    assert f"is a {kind} model, which continues no text without images (" in said and reason in said


def test_a_forward_that_fails_without_weights_and_a_class_of_an_interactive_session_are_not_searched():
    """The class has no source: it is searched by its calls alone."""
    own = type("LlamaOfASession", (transformers.LlamaForCausalLM,), {"__module__": __name__})
    with torch.device("meta"):
        model = own(tiny_config("llama"))
    assert find_uncalled(model) == []
    with patch.object(own, "forward", side_effect=RuntimeError):
        assert find_unreached(model) == []


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("jamba", "mamba.dt_proj.weight"),
        ("gemma3n_text", "altup.correction_coefs.weight"),
        ("deepseek_v4", "self_attn.o_a_proj.weight"),
        ("bamba", "mamba.out_proj.weight"),
        ("mamba2", "mixer.out_proj.weight"),
        ("falcon", ""),
        ("nllb-moe", ""),
        ("bart", ""),
        ("t5", ""),
    ],
)
def test_linear_layers_whose_weight_is_read_without_a_call_are_found(kind, weight):
    found = find_uncalled(kind_on_meta(kind))
    assert all(name.endswith(weight) for name in found) and bool(found) == bool(weight)


def test_a_buffer_without_dimensions_is_hashed():
    """The scale of Gemma 3's embedding: `verify` ended on it."""
    content = b"torch.float32 ()" + torch.tensor([8.0]).numpy().tobytes()
    assert hash_tensor(torch.tensor(8.0), torch.float32) == hashlib.sha256(content).hexdigest()
