"""What a loss does not reach is found without weights, and is what real weights get no gradient for."""

import hashlib
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.families.kinds import kinds, tiny_config
from tests.support.refusals import refusal
from toolkit.models.freeze import find_uncalled, find_unreached, hash_tensor


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("led", "query_global"),
        ("deepseek_v32", "indexer.wk"),
        ("deepseek_v4", "indexer."),
        ("glm_moe_dsa", "indexer.wk"),
        ("hy_v4", "indexer.wk"),
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
    auto, config = getattr(transformers, kinds()[kind]), tiny_config(kind)
    with torch.device("meta"):
        found = find_unreached(auto.from_config(config))
    model = auto.from_config(config).eval()
    tokens = torch.randint(3, 256, (1, 64 if kind == "led" else 128))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
    model(**inputs, use_cache=False).logits.sum().backward()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    assert found == [name for name, gradient in trained if gradient is None or not gradient.any()]
    assert any(part in name for name in found) if part else not found


def test_what_a_models_own_code_freezes_gets_no_adapter():
    with torch.device("meta"):
        found = find_unreached(transformers.AutoModelForCausalLM.from_config(tiny_config("blt")))
    assert found and all(name.startswith("model.patcher.") for name in found)


@pytest.mark.parametrize(("kind", "reason"), [("blip", "'pixel_values'"), ("diffusion_gemma", "its forward takes no labels")])
def test_a_model_that_needs_images_is_refused_before_its_weights_load(kind, reason):
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(tiny_config(kind))
    said = refusal(find_unreached, model)
    assert f"is a {kind} model, which continues no text without images (" in said and reason in said


def test_a_forward_that_fails_without_weights_finds_nothing():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny_config("llama"))
    with patch.object(type(model), "forward", side_effect=RuntimeError):
        assert find_unreached(model) == []


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("jamba", "mamba.dt_proj.weight"),
        ("gemma3n_text", "altup.correction_coefs.weight"),
        ("deepseek_v4", "self_attn.o_a_proj.weight"),
        ("bamba", "mamba.out_proj.weight"),
        ("granitemoehybrid", "mamba.out_proj.weight"),
        ("mamba2", "mixer.out_proj.weight"),
        ("falcon", ""),
        ("nllb-moe", ""),
        ("bart", ""),
        ("t5", ""),
    ],
)
def test_linear_layers_whose_weight_is_read_without_a_call_are_found(kind, weight):
    with torch.device("meta"):
        found = find_uncalled(getattr(transformers, kinds()[kind]).from_config(tiny_config(kind)))
    assert all(name.endswith(weight) for name in found) and bool(found) == bool(weight)


def test_a_class_of_an_interactive_session_is_searched_by_its_calls_alone():
    own = type("LlamaOfASession", (transformers.LlamaForCausalLM,), {"__module__": __name__})
    with torch.device("meta"):
        assert find_uncalled(own(tiny_config("llama"))) == []


def test_a_buffer_without_dimensions_is_hashed():
    """The scale of Gemma 3's embedding: `verify` ended on it."""
    content = b"torch.float32 ()" + torch.tensor([8.0]).numpy().tobytes()
    assert hash_tensor(torch.tensor(8.0), torch.float32) == hashlib.sha256(content).hexdigest()
