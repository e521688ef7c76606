"""Weights in bf16 for a forward and its backward: the numbers of a model in bf16, gradients in fp32, and few launches."""

import copy
import functools

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families.kinds import tiny_config
from tests.support.tiny_models import build_causal
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.parallel.compute_copies import ComputeCopies, cast_inputs, mixes_dtypes, run_within
from toolkit.parallel.units import repeated_blocks

IDS_BT = torch.tensor([[5, 9, 3, 2, 7, 1]])


def copies_of(model: nn.Module) -> ComputeCopies:
    return ComputeCopies(model, repeated_blocks(model).values(), torch.bfloat16)


def loss_of(model) -> torch.Tensor:
    torch.manual_seed(0)
    return model(input_ids=IDS_BT, use_cache=False).logits.float().square().mean()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_loss_and_gradients_are_those_of_a_model_in_bf16(family):
    model = build_causal(family).train()
    in_bf16, again = copy.deepcopy(model), copy.deepcopy(model)
    for parameter in in_bf16.parameters():  # buffers stay, as under FSDP
        parameter.data = parameter.data.to(torch.bfloat16)
    for block in repeated_blocks(in_bf16).values():
        block.register_forward_pre_hook(functools.partial(cast_inputs, torch.bfloat16), with_kwargs=True)
    named = dict(model.named_parameters())
    copies = copies_of(model)
    with copies.held():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        (loss := loss_of(model)).backward()
    assert all(p is named[name] for name, p in model.named_parameters())
    (expected := loss_of(in_bf16)).backward()
    assert torch.equal(loss, expected)
    for name, parameter in in_bf16.named_parameters():
        assert named[name].grad is not None and named[name].grad.dtype == torch.float32
        assert torch.equal(named[name].grad, parameter.grad.float()), name
    # A forward by itself, one with an error, and one with parts frozen.
    with torch.no_grad():
        assert torch.equal(loss_of(model), expected)
    with pytest.raises((TypeError, ValueError)):
        model(nonsense=1)
    assert all(p is named[name] for name, p in model.named_parameters()) and loss_of(model).dtype == torch.float32
    frozen = [p for name, p in again.named_parameters() if "layers.0" in name or "h.0" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    copies_of(again)
    loss_of(again).backward()
    assert sum(p.grad is None for p in again.parameters()) == len(frozen)


def test_a_block_is_one_launch_in_each_direction():
    model = build_causal("llama").train()
    copies, launched = copies_of(model), []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_foreach_copy_" in str(func):
                launched.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Watching(), copies.held():
        loss_of(model).backward()
    num_blocks = len(repeated_blocks(model))
    assert len(launched) == 2 * (num_blocks + 1) and sum(launched) == 2 * len(list(model.parameters()))


def test_inputs_of_blocks_are_cast_wherever_they_stand():
    """As FSDP2 does: rotary positions come as a tuple."""
    ids, positions = torch.arange(3), torch.ones(2)
    given = {"position_embeddings": (positions, [positions, ids]), "masks": {"full": positions}, "cache": None}
    (hidden,), inputs = cast_inputs(torch.bfloat16, nn.Identity(), (positions,), given)
    (one, [two, three]), full = inputs["position_embeddings"], inputs["masks"]["full"]
    assert {each.dtype for each in (hidden, one, two, full)} == {torch.bfloat16}
    assert three is ids and inputs["cache"] is None and given["position_embeddings"][0] is positions


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2", "not of transformers"])
def test_most_models_compute_in_one_dtype(family):
    model = nn.Sequential(nn.Linear(2, 2)) if " " in family else build_causal(family)
    assert not mixes_dtypes(copy_on_meta(model), torch.bfloat16)


def test_a_model_that_mixes_dtypes_in_its_blocks_casts_at_each_product():
    """GPT-1 multiplies scores with a mask in fp32. With a padding token it looks for that, which fails without weights."""
    torch.manual_seed(0)
    model = hf.OpenAIGPTLMHeadModel(tiny_config("openai-gpt")).eval()
    expected = model(input_ids=IDS_BT).logits
    assert mixes_dtypes(copy_on_meta(model), torch.bfloat16)
    plain = copy.deepcopy(model)
    copies_of(plain)
    with pytest.raises(RuntimeError, match="dtype|scalar type"):
        plain(input_ids=IDS_BT)
    run_within(model, functools.partial(torch.autocast, "cpu", torch.bfloat16))
    copies_of(model)
    logits = model(input_ids=IDS_BT).logits
    assert torch.allclose(logits.float(), expected, atol=0.05) and not torch.equal(logits.float(), expected)
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
