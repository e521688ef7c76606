"""Float8 training of a model's blocks with torchao: which Linears are converted, and how to unwrap their weights.

A converted Linear casts its input, its weight and its output's gradient to float8, each with one scale from its largest
element, and multiplies those. Everything around it computes in bf16, and the weight stays the fp32 parameter. With the float8
all-gather, FSDP2 casts each shard before gathering it, which moves half the bytes of bf16. To do so, torchao wraps the shard
in a tensor subclass with the fp32 tensor inside; checkpoints and checks unwrap it with `plain`.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.private import private

MULTIPLE_OF = 16
"""The float8 kernels need both sizes of a weight to be multiples of this."""


def choose_linears(model: nn.Module, blocks: dict[str, nn.Module], num_shards: int) -> dict[str, nn.Linear]:
    """The Linears that train in float8, by name: the trainable ones in blocks, except the model's first, as in accelerate.

    A Linear also stays in bf16 if the kernels do not take its sizes, or if its rows do not divide evenly over the ranks of a
    shard group, which FSDP2 requires of weights that it gathers in another dtype. The output head lies in no block. If no Linear
    is left, or the model has an adapter, that is a `UserError`.
    """
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        raise UserError("mixed_precision is fp8, and an adapter's frozen base takes no part: write bf16, or adapter.method none")
    in_blocks = {id(module) for block in blocks.values() for module in block.modules()}
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    chosen = {}
    for name, linear in linears[1:]:
        rows, columns = linear.weight.shape
        fits = rows % MULTIPLE_OF == columns % MULTIPLE_OF == rows % num_shards == 0
        if fits and id(linear) in in_blocks and linear.weight.requires_grad:
            chosen[name] = linear
    if not chosen:
        what = f"mixed_precision is fp8, but none of the {len(linears)} Linears of {type(model).__name__} can be converted"
        needed = f"trainable, in a block, of sizes that {MULTIPLE_OF} divides, with rows that {num_shards} ranks share equally"
        raise UserError(f"{what}: they must be {needed}; write mixed_precision: bf16")
    return chosen


def convert(model: nn.Module, linears: dict[str, nn.Linear], config: Any) -> None:
    """Replace each Linear by torchao's, of a `Float8LinearConfig`, in place; names and values of parameters stay."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in linears, config=config)


def is_sharded_with_cast(model: nn.Module) -> bool:
    """Whether the model has weights that FSDP2 casts to float8 before it gathers them."""
    return any(isinstance(p, DTensor) and _is_wrapper(private("_local_tensor", p)) for p in model.parameters())


def refresh_scales(model: nn.Module) -> None:
    """Recompute all float8 scales with one all-reduce, after weights have changed; does nothing without float8. Collective.

    Without it, each weight would need its own all-reduce when it is gathered. It causes no host sync.
    """
    if is_sharded_with_cast(model):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


@contextlib.contextmanager
def no_float8(model: nn.Module) -> Iterator[None]:
    """Multiply without float8, by the weights as they are gathered, in a forward without gradients.

    A float8 scale is of all tokens of a micro-batch (torchao/float8/float8_linear.py:56): each token's products are of all.
    """
    linears: list[Any] = [m for m in model.modules() if any(kind.__name__ == "Float8Linear" for kind in type(m).__mro__)]
    for linear in linears:
        linear.forward = functools.partial(_multiply, linear)
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _multiply(linear: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    weight: Any = plain(linear.weight)
    weight = weight.to_original_precision() if hasattr(weight, "to_original_precision") else weight  # gathered in float8
    return nn.functional.linear(inputs, weight.to(inputs.dtype), None if linear.bias is None else linear.bias.to(inputs.dtype))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without torchao's wrapper, sharing its memory; any other tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return private("_tensor", tensor) if _is_wrapper(tensor) else tensor
    local, spec = private("_local_tensor", tensor), private("_spec", tensor)
    if not _is_wrapper(local):
        return tensor
    inside = private("_tensor", local)
    return DTensor.from_local(
        inside.detach(), spec.mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether torchao wraps the tensor; if torchao is not imported, nothing can be wrapped."""
    return "torchao.float8" in sys.modules and isinstance(tensor, private("WeightWithDynamicFloat8CastTensor"))
