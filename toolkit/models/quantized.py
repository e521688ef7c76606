"""Quantized bases: frozen linear layers, and experts, that hold codes and scales in the place of a weight.

Codes and scales are plain parameters, so that FSDP2 shards and gathers them as they are. A block of 64 inputs of an output has
one scale, its largest element: no block crosses a shard of rows. The backward dequantizes again, and keeps no weight for it.

NF4 (QLoRA, arXiv 2305.14314) has two codes in a byte, the first input's in the high four bits. Codes, scales and values are those
of bitsandbytes 0.50.2, bit for bit.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.private import private

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
KERNEL_DEVICE = "cuda"
_kernels: dict[str, Callable[..., torch.Tensor]] = {}
"""What dequantizes NF4 in place of torch's operations, by the type of its device: `choose_kernel`'s."""


def quantize(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes of a weight (…, outputs, inputs): `nf4`'s uint8 (…, outputs, inputs / 2), `int8`'s int8 (…, outputs, inputs)."""
    largest = find_scales(weight).view(torch.float32)
    shares = weight.float().unflatten(-1, (-1, BLOCK_SIZE)) * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)
    shares = shares.clamp_(-1, 1).flatten(-2)
    if kind == "int8":
        return shares.mul_(INT8_LARGEST).round_().to(torch.int8)
    nearest = torch.zeros_like(shares, dtype=torch.uint8)
    for bound in ((NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2).tolist():  # faster than `bucketize`
        nearest += shares > bound
    return nearest[..., ::2] << 4 | nearest[..., 1::2]


def find_scales(weight: torch.Tensor) -> torch.Tensor:
    """The scales of a weight (…, outputs, inputs), in fp32, as bytes (…, outputs, inputs / 16): uint8, because a mixed-precision
    policy would round fp32 parameters when it gathers them."""
    return weight.float().unflatten(-1, (-1, BLOCK_SIZE)).abs().amax(dim=-1).view(torch.uint8)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, pairs: torch.Tensor = NF4_PAIRS
) -> torch.Tensor:
    """The weight (…, outputs, inputs) of codes and scales, computed in fp32. `pairs` is `NF4_PAIRS`, on any device."""
    if codes.ndim > 2:
        return dequantize(codes.flatten(0, -2), scales.flatten(0, -2), dtype, pairs).unflatten(0, codes.shape[:-1])
    num_rows, num_columns = len(codes), scales.shape[1] // 4 * BLOCK_SIZE
    fits = codes.dtype == torch.uint8 and num_rows * num_columns < 2**31  # the kernel counts in int32
    if fits and (kernel := _kernels.get(codes.device.type)):
        return kernel(codes, scales.view(torch.float32).flatten(), BLOCK_SIZE, "nf4", [num_rows, num_columns], dtype)
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


def choose_kernel(device: torch.device) -> str:
    """Choose what dequantizes NF4 on a device, and name it: on a GPU bitsandbytes' kernel, which holds no fp32 copy, if it is
    installed and gives the same values, bit for bit; otherwise torch."""
    if device.type != KERNEL_DEVICE:
        return "torch"
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64)
    scales = (torch.arange(1.0, 9.0, device=device) / 7).view(4, 2).view(torch.uint8)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    expected = [dequantize(codes, scales, dtype) for dtype in dtypes]
    try:
        import bitsandbytes

        _kernels[device.type] = torch.ops.bitsandbytes.dequantize_4bit
        if not all(map(torch.equal, expected, (dequantize(codes, scales, dtype) for dtype in dtypes))):
            raise RuntimeError(f"bitsandbytes {bitsandbytes.__version__} has other values")
        return f"bitsandbytes {bitsandbytes.__version__}"
    except (ImportError, AttributeError, RuntimeError) as error:
        _kernels.clear()
        return f"torch ({error})"


class QuantizedWeight(nn.Module):
    """A frozen weight (…, outputs, inputs), dequantized whenever it is read: in the place of a parameter, that of experts."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        """`weight` is on the meta device; `kind` is `nf4` or `int8`."""
        nn.Module.__init__(self)
        self.kind, self.shape = kind, weight.shape
        plain = weight.detach().contiguous()
        self.codes = nn.Parameter(quantize(plain, kind), requires_grad=False)
        self.scales = nn.Parameter(find_scales(plain), requires_grad=False)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", NF4_PAIRS.clone(), persistent=False)
        self.dtype = weight.dtype  # of `weight`: a plain frozen layer's

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight; changes to it are lost. Of a shard it has no values: T5 asks for its dtype."""
        if isinstance(self.codes, DTensor):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return dequantize(self.codes, self.scales, self.dtype, self.pairs)

    def product(self, inputs: torch.Tensor, bias: torch.Tensor | None = None, ends: torch.Tensor | None = None) -> torch.Tensor:
        """`inputs` (…, inputs) → (…, outputs), with `ends` of the groups for each expert, which follow one another."""
        bias = None if bias is None else bias.to(inputs.dtype)
        return _Product.apply(inputs, self.codes, self.scales, bias, self.pairs, ends)


class QuantizedLinear(QuantizedWeight, nn.Linear):  # type: ignore[override]
    """A frozen linear layer; peft takes it for the plain layer that it was."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__(linear.weight, kind)
        self.out_features, self.in_features = linear.weight.shape
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` (…, inputs) → (…, outputs)."""
        return self.product(inputs, self.bias)


class _Product(torch.autograd.Function):
    """`F.linear`, or a grouped product, which keeps codes for the backward in the place of a weight."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, codes: Any, scales: Any, bias: Any, pairs: Any, ends: Any) -> torch.Tensor:
        ctx.save_for_backward(codes, scales, pairs, ends)
        weight = dequantize(codes, scales, inputs.dtype, pairs)
        return F.linear(inputs, weight, bias) if ends is None else private("_grouped_linear")(inputs, weight, ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        codes, scales, pairs, ends = ctx.saved_tensors
        weight = dequantize(codes, scales, gradient.dtype, pairs)
        back = gradient @ weight if ends is None else private("_grouped_linear")(gradient, weight, ends, is_transposed=True)
        return back, None, None, None, None, None


def quantize_layers(model: nn.Module, kind: str) -> None:
    """Replace the base of each adapted linear layer of a model on the meta device, and the adapted weights of experts, in
    place. The output head stays, and what has a number of inputs that `BLOCK_SIZE` does not divide, or inputs before outputs;
    if none is left, that is a `UserError`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    adapted: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A") and type(m.base_layer).__name__ in LINEAR_CLASSES]
    chosen = [module for module in adapted if module is not head and module.base_layer.in_features % BLOCK_SIZE == 0]
    wrappers: Any = [module for module in model.modules() if hasattr(module, "parameter_name")]
    experts = [(m.get_base_layer(), m.parameter_name) for m in wrappers if not m.get_base_layer().is_transposed]
    experts = [(holder, held) for holder, held in experts if getattr(holder, held).shape[-1] % BLOCK_SIZE == 0]
    if not chosen and not experts:
        what = f"none of the {len(adapted)} adapted layers has a number of inputs that {BLOCK_SIZE} divides"
        raise UserError(f"adapter.base_dtype is {kind}, but {what}: leave it out")
    for module in chosen:
        module.base_layer = QuantizedLinear(module.base_layer, kind)
    for holder, held in experts:
        weight = getattr(holder, held)
        delattr(holder, held)
        setattr(holder, held, QuantizedWeight(weight, kind))


def is_quantized(model: nn.Module) -> bool:
    """Whether the model has a quantized layer."""
    return any(isinstance(module, QuantizedWeight) for module in model.modules())


def dequantize_layers(model: nn.Module) -> None:
    """Put plain linear layers and weights on the meta device into the places of quantized ones."""
    for module in list(model.modules()):
        for name, held in list(module.named_children()):
            if not isinstance(held, QuantizedWeight):
                continue
            plain: Any = nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device="meta"), requires_grad=False)
            if isinstance(held, QuantizedLinear):
                linear = nn.Linear(held.in_features, held.out_features, bias=False, device="meta")
                linear.weight, linear.bias, plain = plain, held.bias, linear
            delattr(module, name)
            setattr(module, name, plain)


def weight_name(name: str) -> str:
    """The name of the weight that codes or scales of this name stand for; another name as it is."""
    return re.sub(r"(\.base_layer)?\.(codes|scales)$", lambda match: ".base_layer.weight" if match[1] else "", name)


def dequantized(named: Iterable[tuple[str, torch.Tensor]], model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Unsharded parameters of a model, as they come, by name, with weights in the place of codes and scales."""
    codes = torch.empty(0)
    for name, tensor in named:
        layer_name, _, held = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        if not isinstance(layer, QuantizedWeight) or held == "bias":
            yield name, tensor
        elif held == "codes":
            codes = tensor
        else:
            yield weight_name(name), dequantize(codes, tensor, layer.dtype)


def num_weights(name: str, parameter: torch.Tensor) -> int:
    """How many weights of the model a parameter stands for: two a byte of NF4's codes, and none for scales."""
    if parameter.dtype != torch.uint8:
        return parameter.numel()
    return 0 if name.rpartition(".")[2] == "scales" else 2 * parameter.numel()
