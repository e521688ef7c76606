"""Quantized bases: frozen linear layers that hold codes and scales in the place of a weight.

Codes and scales are plain parameters, so that FSDP2 shards and gathers them as they are. A block of 64 inputs of an output has
one scale, its largest element: no block crosses a shard of rows. The backward dequantizes again, and keeps no weight for it.

NF4 (QLoRA, arXiv 2305.14314) has two codes in a byte, the first input's in the high four bits. Codes, scales and values are those
of bitsandbytes 0.50.2, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError

BLOCK_SIZE = 64
"""Inputs that share a scale."""
LINEAR_CLASSES = ("Linear", "FalconLinear")
"""Of layers that can be quantized, because they compute what `nn.Linear` does."""
INT8_LARGEST = 127
NF4_VALUES = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""Values of the codes 0 to 15."""
NF4_PAIRS = torch.cartesian_prod(NF4_VALUES, NF4_VALUES).view(torch.int64).flatten()
"""Both fp32 values of a byte of codes, as one integer, because one look-up is several times as fast as two."""
WEIGHTS_AT_ONCE = 2**24
"""Most weights that are dequantized at once, because of the fp32 copy."""


def quantize(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes of a weight (outputs, inputs): `nf4`'s uint8 (outputs, inputs / 2), `int8`'s int8 (outputs, inputs)."""
    largest = find_scales(weight).view(torch.float32)
    shares = weight.float().unflatten(1, (-1, BLOCK_SIZE)) * (1.0 / largest.clamp(min=1e-38)).unsqueeze(2)
    shares = shares.clamp_(-1, 1).flatten(1)
    if kind == "int8":
        return shares.mul_(INT8_LARGEST).round_().to(torch.int8)
    nearest = torch.zeros_like(shares, dtype=torch.uint8)
    for bound in ((NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2).tolist():  # faster than `bucketize`
        nearest += shares > bound
    return nearest[:, ::2] << 4 | nearest[:, 1::2]


def find_scales(weight: torch.Tensor) -> torch.Tensor:
    """The scales of a weight (outputs, inputs), in fp32, as bytes (outputs, inputs / 16): uint8, because a mixed-precision policy
    would round fp32 parameters when it gathers them."""
    return weight.float().unflatten(1, (-1, BLOCK_SIZE)).abs().amax(dim=2).view(torch.uint8)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, pairs: torch.Tensor = NF4_PAIRS
) -> torch.Tensor:
    """The weight (outputs, inputs) that codes and scales stand for, computed in fp32. `pairs` is `NF4_PAIRS`, on any device."""
    num_rows, num_columns = len(codes), scales.shape[1] // 4 * BLOCK_SIZE
    weight = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    if codes.is_meta:
        return weight
    rows_at_once = max(1, WEIGHTS_AT_ONCE // num_columns)
    for begin in range(0, num_rows, rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        largest = scales[rows].view(torch.float32).reshape(-1, 1)
        if codes.dtype == torch.int8:
            values, largest = codes[rows].float(), largest / INT8_LARGEST
        else:
            values = pairs.to(codes.device).index_select(0, codes[rows].flatten().int()).view(torch.float32)
        weight[rows] = values.view(-1, BLOCK_SIZE).mul_(largest).view(-1, num_columns)
    return weight


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose `weight` is dequantized whenever it is read; peft takes it for the plain layer that it was."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        """`linear` is on the meta device; `kind` is `nf4` or `int8`."""
        nn.Module.__init__(self)
        self.kind = kind
        self.out_features, self.in_features = linear.weight.shape

        def frozen(num_columns: int, dtype: torch.dtype) -> nn.Parameter:
            empty = torch.empty(self.out_features, num_columns, dtype=dtype, device="meta")
            return nn.Parameter(empty, requires_grad=False)

        self.codes = frozen(self.in_features // 2, torch.uint8) if kind == "nf4" else frozen(self.in_features, torch.int8)
        self.scales = frozen(self.in_features // BLOCK_SIZE * 4, torch.uint8)
        self.bias = linear.bias
        self.pairs: torch.Tensor
        self.register_buffer("pairs", NF4_PAIRS.clone(), persistent=False)
        self.dtype = linear.weight.dtype  # of `weight`: a plain frozen layer's

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantized weight; changes to it are lost. Of a shard it has no values: T5 asks for its dtype."""
        if isinstance(self.codes, DTensor):
            return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        return dequantize(self.codes, self.scales, self.dtype, self.pairs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` (…, inputs) → (…, outputs)."""
        device = inputs.device.type
        casts = device != "meta" and torch.is_autocast_enabled(device)  # which knows no meta device
        dtype = torch.get_autocast_dtype(device) if casts else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(inputs.to(dtype), self.codes, self.scales, bias, self.pairs)


class _Product(torch.autograd.Function):
    """`F.linear`, which keeps codes for the backward in the place of a weight."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, codes: Any, scales: Any, bias: Any, pairs: Any) -> torch.Tensor:
        ctx.save_for_backward(codes, scales, pairs)
        return F.linear(inputs, dequantize(codes, scales, inputs.dtype, pairs), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        codes, scales, pairs = ctx.saved_tensors
        return gradient @ dequantize(codes, scales, gradient.dtype, pairs), None, None, None, None


def quantize_layers(model: nn.Module, kind: str) -> None:
    """Replace the base of each adapted linear layer of a model on the meta device, in place. The output head stays, and layers
    whose number of inputs `BLOCK_SIZE` does not divide.

    Raises:
        UserError: none is left.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    adapted: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A") and type(m.base_layer).__name__ in LINEAR_CLASSES]
    chosen = [module for module in adapted if module is not head and module.base_layer.in_features % BLOCK_SIZE == 0]
    if not chosen:
        raise UserError(
            f"adapter.base_dtype is {kind}, but none of the {len(adapted)} linear layers that the adapter takes, without the "
            f"head, has a number of inputs that {BLOCK_SIZE} divides: leave it out"
        )
    for module in chosen:
        module.base_layer = QuantizedLinear(module.base_layer, kind)


def is_quantized(model: nn.Module) -> bool:
    """Whether the model has a quantized layer."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def dequantize_layers(model: nn.Module) -> None:
    """Put plain linear layers on the meta device into the places of quantized ones."""
    for module in list(model.modules()):
        base: Any = getattr(module, "base_layer", None)
        if not isinstance(base, QuantizedLinear):
            continue
        plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta", dtype=base.dtype).requires_grad_(False)
        plain.bias = base.bias
        module.base_layer = plain


def dequantized(named: Iterable[tuple[str, torch.Tensor]], model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Unsharded parameters of a model, as they come, by name, with weights in the place of codes and scales."""
    codes = torch.empty(0)
    for name, tensor in named:
        layer_name, _, held = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        if not isinstance(layer, QuantizedLinear) or held == "bias":
            yield name, tensor
        elif held == "codes":
            codes = tensor
        else:
            yield f"{layer_name}.weight", dequantize(codes, tensor, layer.dtype)


def num_weights(name: str, parameter: torch.Tensor) -> int:
    """How many weights of the model a parameter stands for: two a byte of NF4's codes, and none for scales."""
    if parameter.dtype != torch.uint8:
        return parameter.numel()
    return 0 if name.rpartition(".")[2] == "scales" else 2 * parameter.numel()
