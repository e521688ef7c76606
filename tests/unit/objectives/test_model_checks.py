"""What differs between objectives stands in `toolkit/objectives/`, so that another one is one file; and what a run tries on
its causal model before it trains."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers

import toolkit
from tests.families.kinds import tiny_config
from tests.support.refusals import refusal
from tests.support.tiny_models import build_causal
from toolkit.config.python import load_config
from toolkit.config.schema import ModelConfig
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.models.patches import chunked_loss
from toolkit.objectives import model_checks, name_objective, objective_of
from toolkit.objectives.objective import Objective
from toolkit.parallel import float8

PACKAGE = Path(toolkit.__file__).parent
REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 1}
QUESTION = re.compile(
    r"isinstance\([^\n]*\b(LLMConfig|SummarizationConfig|LLMDataConfig|DataConfig|SummarizationCollator|CausalCollator)\b"
    r"|auto_class ==|\bobjective(\.name)? (is|==|in) |\"decoder_input_ids\" in|^from [^\n]*\b(LLMConfig|SummarizationConfig)\b",
    re.MULTILINE,
)
ASKING = ["config/python.py"]
"""Files that ask which objective it is: the recipes by name."""


def test_no_code_asks_which_objective_it_has():
    core = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if not {"tools", "objectives"} & {*path.parts}]
    assert len(core) > 100
    assert [str(path) for path in core if QUESTION.search((PACKAGE / path).read_text(encoding="utf-8"))] == ASKING


def test_an_objective_of_a_users_own_is_never_found_by_its_name():
    class Own(Objective):
        name, auto_class, takes = "os", "AutoModel", "a model"

    config, _ = name_objective(load_config("llm", overrides=REQUIRED), Own())
    expected = "objective is os, which Python code has given to finetune(): call that again; no command can find it"
    assert refusal(objective_of, config) == expected
    Own.name = "causal"
    assert refusal(name_objective, config, Own()).startswith("objective is Own, with the name causal of a built-in one")
    Own.name, Own.auto_class = "os", "AutoModelForLetters"
    sentence = "auto_class of objective os is AutoModelForLetters, which transformers does not have"
    assert refusal(name_objective, config, Own()) == sentence
    sentence = "objective os limits its rows by data.max_length_tokens, and a SummarizationConfig has none: load the config as"
    Own.auto_class = "AutoModel"
    assert refusal(name_objective, load_config("t5", overrides=REQUIRED), Own()).startswith(sentence)
    for given, shown in ((Own, "<class "), ("os", "'os'"), (Objective(), "Objective: give an object of a class that inherits")):
        assert refusal(name_objective, config, given).startswith(f"objective is {shown}")


@pytest.mark.parametrize(
    ("kind", "named", "auto_class"),
    [
        ("llama", "LlamaForCausalLM", "AutoModelForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", None, "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
        ("llama4", "Llama4ForConditionalGeneration", "AutoModelForImageTextToText"),
    ],
)
def test_a_model_of_images_and_texts_is_loaded_whole(kind, named, auto_class):
    """As `architectures` says, where both of its classes take the config. Both classes are Gemma 3's own."""
    config_class = transformers.CONFIG_MAPPING[kind]
    objective = objective_of(load_config("llm", overrides=REQUIRED))
    assert objective.loader(config_class(architectures=[named] if named else None)).__name__ == auto_class
    if named and auto_class.endswith("ToText"):
        assert objective.loader(config_class).__name__ == auto_class, "a user's class has a class of configs alone"


def test_a_model_whose_tokens_see_later_ones_is_refused_by_its_config():
    objective = objective_of(load_config("llm", overrides=REQUIRED))
    said = refusal(objective.check_model_config, tiny_config("paligemma"), ModelConfig(name_or_path="m"))
    what = (
        "model.name_or_path m is a paligemma model with use_bidirectional_attention in its config.json: its tokens see later ones"
    )
    assert said.startswith(f"{what}, so it is not a causal language model")
    for kind in ("gemma3", "gemma4", "llama"):
        objective.check_model_config(tiny_config(kind), ModelConfig(name_or_path="m"))


@pytest.fixture
def model(monkeypatch):
    """A tiny Llama, as if it were sharded."""
    model = build_causal("llama")
    chunked_loss.install(model)
    monkeypatch.setattr(model_checks, "evaluation_model", lambda sharded, unshard: nullcontext((model, False)))
    return model


def check(model, collator=None, packing: bool = True, mixed_precision: str = "no") -> None:
    accelerator = type("Accelerator", (), {"device": torch.device("cpu"), "mixed_precision": mixed_precision})
    sharded = type("Sharded", (), {"unwrapped": model, "accelerator": accelerator})
    model_checks.check_causal_model(sharded, collator or CausalCollator(0), packing=packing)


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_trains_in_float8_is_checked_exactly(monkeypatch, model, seed):
    """One scale is taken over all tokens: with another last token the products of the first ones change in their last bits."""
    from torchao.float8 import Float8LinearConfig

    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    linears = {name: module for name, module in model.model.layers.named_modules() if type(module) is torch.nn.Linear}
    float8.convert(model.model.layers, linears, Float8LinearConfig(emulate=True))
    check(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    again = model(input_ids=ids).logits
    assert {type(module).__name__ for module in model.model.layers.modules()} >= {"Float8Linear"}
    with float8.no_float8(model):
        assert not torch.equal(model(input_ids=ids).logits, again), "float8 is off for the checks alone"
    assert torch.equal(model(input_ids=ids).logits, again)


class Changed(CausalCollator):
    def collate(self, packs, *, is_dummy: bool = False):
        batch = super().collate(packs, is_dummy=is_dummy)
        if "position_ids" in batch:
            self.change(batch, len(packs))
        return batch


class Forgetful(Changed):
    """As flash attention: positions of several rows go unheard."""

    def change(self, batch, num_packs: int) -> None:
        if num_packs > 1:
            del batch["position_ids"]


class Shifted(Changed):
    """No leak: the second text of a pack stands at other positions than alone."""

    def change(self, batch, num_packs: int) -> None:
        batch["position_ids"] = batch["position_ids"] * 2


def test_packs_that_leak_or_differ_from_single_rows_are_found(model):
    assert "lets packed rows see each other: set data.packing to false" in refusal(check, model, Forgetful(0))
    check(model, Forgetful(0), packing=False)
    assert "(packed: try data.packing false)" in refusal(check, model, Shifted(0))


def test_a_model_whose_tokens_see_later_ones_is_refused(model):
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.is_causal = False
        layer.self_attn.forward = lambda *args, forward=forward, **inputs: forward(*args, **{**inputs, "attention_mask": None})
    assert "its tokens see later ones" in refusal(check, model)


def test_a_good_model_passes_gathered_three_times_and_one_of_nan_is_named_for_that(model):
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    for one_row, packing in ((False, True), (False, False), (True, True)):
        calls.clear()
        check(model, CausalCollator(0, one_row=one_row), packing)
        assert len(calls) == 3
    model.model.norm.weight.data.fill_(float("nan"))
    assert "its loss by hidden states is nan, by its logits nan" in refusal(check, model)


def test_the_tolerance_follows_what_the_model_computes_in(model, monkeypatch):
    """Whatever the dtype of the logits: a good model in bf16 was held to fp32's tolerance."""
    monkeypatch.setattr(chunked_loss, "_logits", lambda model, heads, hidden_nD: 1.1 * heads["lm_head"].forward(hidden_nD))
    check(model, mixed_precision="bf16")
    assert "its loss by hidden states is" in refusal(check, model)


def test_a_rank_that_died_during_the_trial_is_no_fault_of_the_model():
    """It was reported as a model that cannot be trained, with advice on precision."""
    gone = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242")
    with pytest.raises(RuntimeError, match="closed by peer") as raised, model_checks._failing_as("T5 cannot be trained here", ""):
        raise gone
    assert raised.value is gone
    with (
        pytest.raises(UserError, match="T5 cannot be trained here .mat1 and mat2"),
        model_checks._failing_as("T5 cannot be trained here", "try another"),
    ):
        raise RuntimeError("mat1 and mat2 must have the same dtype")
