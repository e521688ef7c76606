"""Quantized bases: codes and values of bitsandbytes, and layers that compute what plain ones do on the dequantized weight."""

import json
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from tests.families.kinds import kind_on_meta
from tests.support.adapter_models import adapter_config
from tests.support.host_reads import recorded
from tests.support.nf4_golden import GOLDEN, as_hex, build_weight
from tests.support.refusals import refusal
from toolkit.config.schema import ModelConfig
from toolkit.models import quantized
from toolkit.models.freeze import cast_frozen
from toolkit.models.lora import add_adapter
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import NF4_VALUES, QuantizedLinear, choose_kernel, dequantize, find_scales, num_weights, quantize
from toolkit.models.tensor_reader import TensorReader
from toolkit.models.weights import _by_rows
from toolkit.parallel.compute_copies import ComputeCopies

KINDS = ("nf4", "int8")


@pytest.mark.parametrize("weights_at_once", [quantized.WEIGHTS_AT_ONCE, 3 * 192])
def test_nf4_is_that_of_bitsandbytes_bit_for_bit(weights_at_once, monkeypatch):
    monkeypatch.setattr(quantized, "WEIGHTS_AT_ONCE", weights_at_once)
    golden, weight = json.loads(GOLDEN.read_text()), build_weight()
    codes, scales = quantize(weight, "nf4"), find_scales(weight)
    assert golden["bitsandbytes"] == "0.50.2"
    assert as_hex(NF4_VALUES) == golden["table"]
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((4, 96), torch.uint8, (4, 12), torch.uint8)
    assert as_hex(codes) == golden["codes"]
    assert as_hex(scales) == golden["scales"]
    for dtype in (torch.float32, torch.bfloat16):
        assert as_hex(dequantize(codes, scales, dtype)) == golden[str(dtype)]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ("exact", "bitsandbytes 0.50.2"),
        ("other values", "torch (bitsandbytes 0.50.2 has other values)"),
        ("nothing", "torch (import of bitsandbytes halted; None in sys.modules)"),
    ],
)
def test_on_a_gpu_the_kernel_of_bitsandbytes_is_taken_if_its_values_are_the_same(found, chosen, monkeypatch):
    """With the CPU in the GPU's place, and for the kernel what it computes (bitsandbytes 0.50.2, csrc/kernels.cu:519)."""
    calls = []

    def kernel(codes, scales, block_size: int, kind: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        calls.append((scales.dtype, scales.ndim, block_size, kind))
        values = NF4_VALUES[torch.stack((codes >> 4, codes & 15), dim=-1).flatten().int()].view(-1, block_size)
        scales = scales if found == "exact" else scales.to(dtype)
        return (values * scales.unsqueeze(1)).view(shape).to(dtype)

    codes, scales = encoded(build_weight(), "nf4")
    expected = {dtype: dequantize(codes, scales, dtype) for dtype in (torch.float32, torch.bfloat16)}
    monkeypatch.setattr(quantized, "_kernels", {})
    monkeypatch.setattr(torch.ops, "bitsandbytes", SimpleNamespace(dequantize_4bit=kernel), raising=False)
    module = None if found == "nothing" else SimpleNamespace(__version__="0.50.2")
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    assert choose_kernel(torch.device("cpu")) == "torch" and not calls
    monkeypatch.setattr(quantized, "KERNEL_DEVICE", "cpu")
    assert choose_kernel(torch.device("cpu")) == chosen
    calls.clear()
    for dtype, values in expected.items():
        assert torch.equal(dequantize(codes, scales, dtype), values)
    assert calls == [(torch.float32, 1, 64, "nf4")] * (2 if found == "exact" else 0)


def encoded(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize(weight, kind), find_scales(weight)


@pytest.mark.parametrize("weights_at_once", [quantized.WEIGHTS_AT_ONCE, 3 * 192])
def test_int8_is_off_by_half_a_step_at_most(weights_at_once, monkeypatch):
    monkeypatch.setattr(quantized, "WEIGHTS_AT_ONCE", weights_at_once)
    weight = build_weight()
    codes, scales = encoded(weight, "int8")
    assert codes.dtype == torch.int8 and int(codes.abs().max()) == 127
    step = scales.view(torch.float32) / 127
    off = (dequantize(codes, scales) - weight).unflatten(1, (-1, 64)).abs()
    assert bool((off <= step.unsqueeze(2) * 0.5001).all())
    assert bool((dequantize(codes, scales)[1, :64] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapted_layers_compute_what_plain_peft_does_on_the_dequantized_base(kind, dtype, use_dora):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(192, 128, bias=False), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    for layer in (plain[0], plain[2]):
        layer.weight.data = dequantize(*encoded(layer.weight.data, kind))
    quantized_one = nn.Sequential(*(QuantizedLinear(layer, kind) if isinstance(layer, nn.Linear) else layer for layer in plain))
    config = LoraConfig(r=4, target_modules=["0", "2"], use_dora=use_dora, init_lora_weights=False)
    for model in (plain, quantized_one):
        torch.manual_seed(1)
        inject_adapter_in_model(config, model)
    inputs = torch.randn(5, 192)
    for model in (plain, quantized_one):
        with ComputeCopies(model, [], dtype).held():
            model(inputs.to(dtype)).float().square().mean().backward()
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (plain, quantized_one)]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == (6 if use_dora else 4)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize(("kind", "codes_dtype", "bytes_of_16"), [("nf4", torch.uint8, 9), ("int8", torch.int8, 17)])
def test_the_backward_keeps_codes_and_no_weight_and_the_host_reads_nothing(kind, codes_dtype, bytes_of_16):
    layer, kept, reads = QuantizedLinear(nn.Linear(192, 128).requires_grad_(False), kind), [], Counter()
    with recorded(reads), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(3, 192, requires_grad=True)).sum().backward()
    assert not reads
    assert {tensor.dtype for tensor in kept} == {torch.uint8, codes_dtype, torch.int64}
    assert sum(tensor.nbytes for tensor in kept if tensor.dtype != torch.int64) == 192 * 128 * bytes_of_16 // 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_of_a_model_the_adapted_layers_that_64_divides_are_quantized(name, kind):
    model = in_codes(name, kind, modules_to_save=["lm_head"] if name == "llama" else [])
    cast_frozen(model, torch.bfloat16)
    held = {n: p.dtype for n, p in model.named_parameters() if not p.requires_grad}
    codes = [n for n in held if n.endswith(".codes")]
    assert codes and {held[n] for n in codes} == {torch.uint8 if kind == "nf4" else torch.int8}
    assert {held[n.replace(".codes", ".scales")] for n in codes} == {torch.uint8}
    others = {n: dtype for n, dtype in held.items() if not n.endswith((".codes", ".scales"))}
    assert set(others.values()) == {torch.bfloat16}
    narrow = {"llama": ("down_proj",), "t5": (".wo",)}[name]  # of 96 inputs
    assert {n for n in others if ".base_layer." in n} == {n for n in others if any(end in n for end in narrow)} != set()
    # Names and numbers of weights are those of the plain model.
    numbers: dict[str, int] = {}
    for n, p in model.named_parameters():
        if (own := base_name(n)) is not None:
            numbers[own] = numbers.get(own, 0) + num_weights(n, p)
    assert numbers == {n: p.numel() for n, p in kind_on_meta(name).named_parameters()}


def test_falcon_s_own_linear_layers_are_quantized_and_compute_the_same():
    found = {name for name, module in in_codes("falcon", "nf4").named_modules() if isinstance(module, QuantizedLinear)}
    ends = {"dense", "query_key_value", "dense_h_to_4h", "dense_4h_to_h"}
    assert {name.removesuffix(".base_layer").rpartition(".")[2] for name in found} == ends
    inputs, weight, bias = torch.randn(3, 64), torch.randn(8, 64), torch.randn(8)
    own = FalconLinear(64, 8)
    own.weight.data, own.bias.data = weight, bias
    torch.testing.assert_close(own(inputs), nn.functional.linear(inputs, weight, bias))


def test_a_base_without_a_layer_to_quantize_is_refused():
    sentence = "adapter.base_dtype is nf4, but none of the 2 adapted layers has a "
    assert refusal(in_codes, "llama", "nf4", target_modules=["down_proj"]).startswith(sentence)


def in_codes(name: str, base_dtype: str, **settings):
    """A model on the meta device, adapted and quantized. Its rows are 64 long, except those of the layer after the activation."""
    model = kind_on_meta(name)
    add_adapter(model, adapter_config(base_dtype=base_dtype, **settings), ModelConfig(name_or_path="not/read", revision="1"))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_is_quantized_from_pieces_of_its_own_rows(kind, monkeypatch):
    weight, read = build_weight().repeat(4, 1), []
    monkeypatch.setattr("toolkit.models.tensor_reader.PIECE_BYTES", 3 * 192 * 4)
    of_files = TensorReader(tuple(weight.shape), lambda box: read.append(box) or weight[box])
    codes, scales = encoded(weight, kind)
    for whole, make in ((codes, partial(quantize, kind=kind)), (scales, find_scales)):
        part = _by_rows(of_files, whole.shape, make).read((slice(5, 13), slice(0, 7)))
        assert torch.equal(part, whole[5:13, :7])
    assert [(rows.start, rows.stop) for rows, _ in read] == [(5, 8), (8, 11), (11, 13)] * 2
