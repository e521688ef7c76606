"""What a run tries on its causal model before it trains."""

from contextlib import nullcontext

import pytest
import torch

from tests.support.refusals import refusal
from tests.support.tiny_models import build_causal
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.models.patches import chunked_loss
from toolkit.objectives import model_checks
from toolkit.parallel import float8


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


def test_a_good_model_passes_in_rows_and_in_one_row(model):
    check(model)
    check(model, CausalCollator(0, one_row=True))


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


def test_packs_that_leak_only_where_a_micro_batch_has_several_are_found(model):
    class Forgetful(CausalCollator):
        """As flash attention: positions of several rows go unheard."""

        def collate(self, packs, *, is_dummy: bool = False):
            batch = super().collate(packs, is_dummy=is_dummy)
            if len(packs) > 1:
                batch.pop("position_ids", None)
            return batch

    assert "lets packed rows see each other: set data.packing to false" in refusal(check, model, Forgetful(0))
    check(model, Forgetful(0), packing=False)


def test_a_model_whose_tokens_see_later_ones_is_refused(model):
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.is_causal = False
        layer.self_attn.forward = lambda *args, forward=forward, **inputs: forward(*args, **{**inputs, "attention_mask": None})
    assert "its tokens see later ones" in refusal(check, model)


def test_a_good_model_is_gathered_three_times_and_one_of_nan_is_named_for_that(model):
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    for packing in (True, False):
        calls.clear()
        check(model, packing=packing)
        assert len(calls) == 3
    model.model.norm.weight.data.fill_(float("nan"))
    assert "its loss by hidden states is nan, by its logits nan" in refusal(check, model)


def test_packed_rows_that_are_not_single_ones_are_found(model):
    """No leak: the second text of a pack stands at other positions than alone."""

    class Shifted(CausalCollator):
        def collate(self, packs, *, is_dummy: bool = False):
            batch = super().collate(packs, is_dummy=is_dummy)
            if "position_ids" in batch:
                batch["position_ids"] = batch["position_ids"] * 2
            return batch

    assert "(packed: try data.packing false)" in refusal(check, model, Shifted(0))


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
