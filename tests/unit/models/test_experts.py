"""Experts: found by a model's structure, and adapters on them, whose names and values are peft's."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.muse_spark import modeling_muse_spark
from transformers.models.nemotron_h import modeling_nemotron_h

from tests.families.kinds import kind_on_meta, tiny_config
from tests.support.adapter_models import adapter_config, logits, randomize, with_adapter
from tests.support.model_folders import LLAMA_SIZES, MIXTURES, T5_SIZES
from tests.support.refusals import refusal
from tests.support.tiny_models import build_causal
from toolkit.models.expert_adapters import compute_beside, weights_of
from toolkit.models.experts import check_experts, expert_counts
from toolkit.models.lora_files import base_name
from toolkit.models.patches.experts import experts_by_token

SWITCH = T5_SIZES | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


def test_experts_are_counted_in_nested_configs_too():
    model = nn.Module()
    for expected, settings in (
        ({8}, {"num_experts": 8}),
        ({16}, {"text_config": {"num_local_experts": 16}}),
        ({4}, {"ffn_config": {"moe_num_experts": 4}}),
        (set(), {"num_local_experts": 1, "text_config": {"hidden_size": 4}}),
        (set(), {"num_experts": None, "n_routed_experts": 0}),
    ):
        model.config = transformers.PreTrainedConfig(**settings)
        assert expert_counts(model) == expected, settings


def test_experts_that_are_modules_are_refused():
    # As many blocks as experts; two MLPs a block that every token goes through; no experts.
    mixtral, llama = transformers.MixtralConfig(**LLAMA_SIZES, num_local_experts=2), transformers.LlamaConfig(**LLAMA_SIZES)
    with torch.device("meta"):
        switch = AutoModelForSeq2SeqLM.from_config(transformers.SwitchTransformersConfig(**SWITCH))
        others = [AutoModelForCausalLM.from_config(config) for config in (mixtral, tiny_config("longcat_flash"), llama)]
    path = "encoder.block.1.layer.1.mlp.experts"
    sentence = f"model.name_or_path here has 4 experts as separate modules ({path}), and FSDP2 would add up gradients of "
    assert refusal(check_experts, switch, "here").startswith(sentence)
    for model in others:
        check_experts(model, "here")


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ALL_LINEAR: dict[str, set[str]] = dict.fromkeys(MIXTURES, ATTENTION) | {
    "qwen2_moe": ATTENTION | {"gate_proj", "up_proj", "down_proj"},  # of the shared expert
    # peft takes the names of its dense layers and shared experts for those of its experts.
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
}
INPUTS = {"input_ids": torch.arange(2, 36).view(2, 17)}


def adapt(model, **settings):
    return with_adapter(model, adapter_config(**settings))


def adapted_parameters(model: nn.Module) -> set[str]:
    """Names in the plain model of the layers and weights that have an adapter."""
    found = {name: getattr(m, "parameter_name", "weight") for name, m in model.named_modules() if hasattr(m, "lora_A")}
    return {str(base_name(f"{name}.base_layer.{held}")) for name, held in found.items()}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_all_linear_leaves_experts_and_routers_out_unless_asked(family, experts):
    plain, model = build_causal(family), adapt(build_causal(family), experts=experts)
    adapted = adapted_parameters(model)
    own = {name for name in adapted if name.endswith(".weight")}
    assert {name.split(".")[-2] for name in own} == ALL_LINEAR[family]
    held = {name for name, p in plain.named_parameters() if p.ndim == 3}
    assert len(held) == 4 - 2 * (family == "deepseek_v3") and adapted - own == (held if experts else set())
    frozen = [base_name(name) for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_low_rank_beside_the_products_is_pefts(family, rank):
    model = adapt(build_causal(family), rank=rank, experts=True)
    randomize(model)
    folded = build_causal(family)
    inject_adapter_in_model(copy.deepcopy(model.peft_config["default"]), folded)
    folded.load_state_dict(model.state_dict())
    folded.config._experts_implementation = "eager"
    for adapted in (model, folded):
        adapted(**INPUTS, use_cache=False).logits.square().sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        expected = folded.get_parameter(name).grad
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name
    expected = logits(folded, INPUTS)
    torch.testing.assert_close(logits(model, INPUTS), expected)
    with experts_by_token(model):
        torch.testing.assert_close(logits(model, INPUTS), expected)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    torch.testing.assert_close(logits(model, INPUTS), logits(build_causal(family), INPUTS))


@pytest.mark.parametrize("kind", [modeling_nemotron_h.NemotronHExperts, modeling_muse_spark.MuseSparkExperts])
def test_experts_without_a_gate_and_with_a_norm_behind_them_have_adapters_too(kind):
    sizes = dict.fromkeys(("n_routed_experts", "num_local_experts"), 4) | {"moe_latent_size": None, "post_norm_eps": 1e-6}
    sizes |= dict.fromkeys(("hidden_size", "moe_hidden_size", "moe_intermediate_size"), 16)
    config = SimpleNamespace(**sizes, mlp_hidden_act="relu2", hidden_act="silu", _experts_implementation="grouped_mm")
    model = nn.ModuleDict({"experts": kind(config)})
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    names = [f"experts.{weight}" for weight in weights_of(model["experts"])]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=[], target_parameters=names), model)
    randomize(model)
    hidden, chosen, weights = torch.randn(9, 16), torch.randint(4, (9, 2)), torch.rand(9, 2)
    config._experts_implementation = "eager"
    expected = model["experts"](hidden, chosen, weights)
    config._experts_implementation = "grouped_mm"
    compute_beside(model, "a test")
    torch.testing.assert_close(model["experts"](hidden, chosen, weights), expected)


def test_a_small_adapter_survives_bf16_which_a_folded_one_does_not():
    """The weight that products stand for, found from many of them, holds A·B, a thousandth of it, or does not."""
    model = adapt(build_causal("qwen3_moe", torch.bfloat16, hidden_size=64), rank=8, experts=True, target_modules=[])
    randomize(model)
    outer = model.model.layers[0].mlp.experts
    inner, experts = outer.base_layer, outer.get_base_layer()
    experts.gate_up_proj.data.normal_()
    inner.lora_B["default"].weight.data *= 0.03
    weight, delta = experts.gate_up_proj[0].float(), inner.get_delta_weight("default").float()[0]
    assert 5e-4 < delta.norm() / weight.norm() < 2e-3
    hidden, chosen = torch.randn(16384, 64).bfloat16(), torch.zeros(16384, 1, dtype=torch.int64)
    sorted_hidden = hidden[chosen.flatten().sort().indices].float()
    apply_gate, lost = experts._apply_gate, {}
    for class_ in (type(outer), ParamWrapper):
        outer.__class__ = inner.__class__ = class_
        with patch.object(experts, "_apply_gate", Mock(side_effect=apply_gate)) as gate, torch.no_grad():
            outer(hidden, chosen, torch.ones(16384, 1).bfloat16())
        found = torch.linalg.lstsq(sorted_hidden, gate.call_args.args[0].float()).solution.T
        lost[class_] = ((found - weight - delta).norm() / delta.norm()).item()
    assert lost.pop(ParamWrapper) > 0.6 and all(share < 0.2 for share in lost.values()), lost


def test_what_cannot_be_adapted_is_refused_and_an_adapter_of_some_experts_taken(tmp_path):
    sentence = "adapter.experts is true, but LlamaForCausalLM has no experts that transformers computes by groups of tokens"
    assert refusal(adapt, build_causal("llama"), experts=True).startswith(sentence)
    for ends in (["gate_proj"], ["o_proj", "down_proj"]):
        sentence = f"adapter.target_modules {ends[-1]} is what peft takes for experts or routers in a deepseek_v3, also "
        assert refusal(adapt, build_causal("deepseek_v3"), target_modules=ends).startswith(sentence)
    for name, parameters in {"router": ["gate.weight"], "down": ["experts.down_proj"]}.items():
        lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters)
        get_peft_model(build_causal("mixtral"), lora).save_pretrained(tmp_path / name)
    sentence = " weight of model.layers.0.mlp.gate, which is not a weight of experts: adapt its "
    assert sentence in refusal(adapt, build_causal("mixtral"), name_or_path=str(tmp_path / "router"))
    model = adapt(build_causal("mixtral"), name_or_path=str(tmp_path / "down"))
    assert {name.rpartition(".")[2] for name in adapted_parameters(model)} == {"weight", "down_proj"}
    randomize(model)
    model(**INPUTS).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_nested_configs_keep_their_own_choice_of_products():
    """Aria's tower for images could not be built again with the choice of its texts' part."""
    model = kind_on_meta("aria")
    config = model.config
    before = [part._experts_implementation for part in (config, config.text_config, config.vision_config)]
    with experts_by_token(model):
        assert config.text_config._experts_implementation == "batched_mm"
    assert [part._experts_implementation for part in (config, config.text_config, config.vision_config)] == before
    assert before[1] != before[2]
