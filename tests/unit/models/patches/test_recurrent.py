"""Layers that mix tokens other than by attention start afresh at each document of a packed row, and a leak of one is seen; so
does attention whose masks are given positions.
Norms and activations by torch's kernels: the same formulas as transformers', and only where the code is the same."""

import functools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.activations import NewGELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

from tests.families.kinds import WEIGHT_SIZE, kind_on_meta, kinds, tiny_config
from tests.support.tiny_models import build_rows, take_gradients
from toolkit.data.collate import CausalCollator
from toolkit.models.patches import chunked_loss, documents, fused, masks, recurrent
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.tools.plan.kernels import kernels_of_cuda

LENGTHS = (5, 9, 14, 1, 20, 3)
TOLERANCE = 1e-5
LAYERS = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "bamba": "BambaMixer",
    "inkling2_text": "Inkling2DynamicShortConvolution Inkling2ShortConvolution",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvFeedForward RwkvSelfAttention",
    "xlstm": "xLSTMLayer",
    "zaya": "ZayaCCAProjection",
}
"""A family of each kind of layer, and the classes of its layers."""
GIVEN_POSITIONS = (
    *("falcon", "falcon alibi", "gpt_oss", "afmoe", "opt", "bloom", "mpt"),
    *("qwen2_vl", "qwen3_vl", "glm4v", "mistral3", "llava", "kosmos-2.5"),
)
"""Kinds whose masks get no positions in transformers 5.23, and of images and texts, where a position may be several numbers."""


def build(kind: str):
    torch.manual_seed(0)
    config = tiny_config(kind.removesuffix(" alibi"))
    config.update({"alibi": True} if kind.endswith(" alibi") else {})
    model = getattr(transformers, kinds()[config.model_type]).from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_SIZE)
    documents.choose_packed_attention(model, None, "cpu", torch.float32)
    chunked_loss.install(model)
    masks.install(model)
    return model


def take(model, packs: list) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, a pack at a time."""
    total = 0.0
    for pack in packs:
        loss, _ = summed_loss(model, CausalCollator(0, one_row=masks.attends_by_document(model)).collate([pack]))
        loss.backward()
        total += loss.item()
    return total, take_gradients(model)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """As a share of the largest gradient."""
    assert first.keys() == second.keys()
    largest = max(gradient.abs().max().item() for gradient in first.values())
    return max((first[name] - second[name]).abs().max().item() for name in first) / largest


@pytest.mark.parametrize("kind", [*LAYERS, *GIVEN_POSITIONS])
def test_packed_rows_have_the_loss_and_the_gradients_that_they_have_alone(kind):
    model, rows = build(kind), build_rows(LENGTHS)
    layers = recurrent.find_layers(model)
    assert sorted({type(layer).__name__ for layer in layers}) == LAYERS.get(kind, "").split()
    tokens_BT = torch.tensor([rows[2]["input_ids"]])
    text = model(tokens_BT).logits
    alone, gradients = take(model, [[row] for row in rows])
    packed, of_pack = take(model, [rows])
    assert torch.equal(model(tokens_BT).logits, text), "generate reads a row as one text after a packed batch"
    assert packed == pytest.approx(alone, rel=TOLERANCE)
    assert largest_difference(gradients, of_pack) < TOLERANCE
    if not layers:
        return
    # A leak of one layer is seen.
    del layers[0].forward
    leaking, of_leak = take(model, [rows])
    assert leaking != pytest.approx(alone, rel=TOLERANCE) and largest_difference(gradients, of_leak) > 10 * TOLERANCE


def test_a_recomputation_has_the_documents_of_its_forward():
    model, rows = build("qwen3_next"), build_rows(LENGTHS)
    _, expected = take(model, [rows])
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    _, recomputed = take(model, [rows])
    assert largest_difference(expected, recomputed) == 0


def test_kernels_that_keep_documents_apart_get_their_starts(monkeypatch):
    """Both kernels of each layer, once a forward; the stand-ins compute nothing that is compared."""
    calls: list[tuple[str, torch.Tensor]] = []
    convolve, delta_rule = modeling_qwen3_next.causal_conv1d_fn, modeling_qwen3_next.torch_chunk_gated_delta_rule

    def stand_in(name: str, function, *args, **inputs):
        calls.append((name, inputs.pop(name)))
        return function(*args, **{key: value for key, value in inputs.items() if key not in ("seq_idx", "cu_seq_lens_q")})

    monkeypatch.setattr(recurrent, "takes_starts", lambda layer: True)
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", functools.partial(stand_in, "seq_idx", convolve))
    monkeypatch.setattr(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule", functools.partial(stand_in, "cu_seqlens", delta_rule)
    )
    model, rows = build("qwen3_next"), build_rows((2, 3, 1))
    summed_loss(model, CausalCollator(0, one_row=True).collate([rows]))
    num_layers = len(recurrent.find_layers(model))
    assert [name for name, _ in calls] == ["seq_idx", "cu_seqlens"] * num_layers and num_layers > 0
    for name, given in calls:
        assert given.tolist() == ([[0, 0, 1, 1, 1, 2]] if name == "seq_idx" else [0, 2, 5, 6])


def test_starts_are_made_on_the_device():
    """On a GPU the copy of a tensor of the host would wait for all that is queued, in every layer."""
    devices = set()

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            devices.add(result.device.type)
            return result

    of_row = documents.Documents((2, 3, 1), torch.tensor([0, 2, 5, 6], dtype=torch.int32, device="meta"))
    with Made():
        given = recurrent._by_document(lambda **inputs: inputs, of_row, True, (), {})
    assert devices == {"meta"}
    assert [(value.dtype, tuple(value.shape)) for value in given.values()] == [(torch.int64, (4,)), (torch.int32, (1, 6))]


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "qwen3_5_text", "bamba"])
def test_starts_go_to_layers_whose_kernels_are_installed(kind, monkeypatch):
    layer = recurrent.find_layers(kind_on_meta(kind))[0]
    for installed in ((), ("fla",), ("fla", "causal_conv1d")):
        monkeypatch.setattr(recurrent.importlib.util, "find_spec", lambda name, installed=installed: name in installed or None)
        assert recurrent.takes_starts(layer) is (kind != "bamba" and len(installed) == 2)


def test_packs_of_short_rows_are_warned_about():
    model = build("qwen3_next")
    warning = recurrent.warn_of_short_rows(model, 23.6)
    what = "rows have 24 tokens on average, which 1 of the layers of Qwen3NextForCausalLM compute one by one"
    assert warning == f"{what}: data.packing false may be faster"
    assert recurrent.warn_of_short_rows(model, 64) is None and recurrent.warn_of_short_rows(build("llama"), 23.6) is None


@pytest.mark.parametrize("kind", [T5LayerNorm, UMT5LayerNorm, LlamaRMSNorm, Qwen3RMSNorm, NewGELUActivation])
def test_the_kernel_has_the_values_and_gradients_of_transformers(kind):
    module = kind() if kind is NewGELUActivation else kind(24, eps=1e-5)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(3, 5, 24, dtype=torch.float64)
    module.double()

    def compute() -> list[torch.Tensor]:
        module.zero_grad()
        inputs = hidden.clone().requires_grad_()
        (output := module(inputs)).square().sum().backward()
        return [output.detach(), *(each.grad.clone() for each in (inputs, *module.parameters()) if each.grad is not None)]

    theirs = compute()
    fused.install(module)
    ours = compute()
    assert "forward" in vars(module) and len(ours) == len(theirs) == 2 + len(list(module.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_other_code_stays_and_the_planner_keeps_what_the_kernel_keeps(monkeypatch):
    other = Gemma2RMSNorm(8)  # multiplies by 1 + weight
    fused.install(other)
    assert "forward" not in vars(other)
    fused.install(norm := LlamaRMSNorm(8).bfloat16())
    kept: list[torch.Tensor] = []
    hidden = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    with kernels_of_cuda(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(hidden).sum().backward()
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [
        (torch.bfloat16, (2, 3, 8)), (torch.bfloat16, (8,)), (torch.float32, (2, 3, 1))
    ]  # fmt: skip
    assert hidden.grad is not None and norm.weight.grad is not None
    # Without the source of transformers no code is known.
    monkeypatch.setattr(fused, "_code", lambda kind: "")
    fused.install(unknown := LlamaRMSNorm(8))
    assert "forward" not in vars(unknown)
