"""Frozen parameters: which they are, what they are stored in, and a hash of them."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.errors import UserError

if TYPE_CHECKING:
    pass


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze every parameter one of whose names (tied aliases included) is matched whole by a pattern.

    Raises:
        UserError: a pattern that is no regular expression or matches nothing, or nothing left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            matched = [parameter for name, parameter in named if re.fullmatch(pattern, name)]
        except re.error as error:
            raise UserError(f"model.freeze {pattern!r} is not a regular expression ({error})") from None
        if not matched:
            raise UserError(f"model.freeze {pattern!r} matches no parameter; names look like {named[0][0]}, {named[-1][0]}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for _, p in named):
        raise UserError(f"model.freeze {patterns} freezes every parameter: leave something to train")


def freeze_as(model: nn.Module, skeleton: nn.Module) -> None:
    """Freeze what is frozen in the skeleton: by `freeze`, or by the model's own code (Pegasus' sinusoidal positions).

    transformers 5.23 forgets the latter when it loads weights: every parameter comes back trainable.
    """
    frozen = {name for name, parameter in skeleton.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            parameter.requires_grad_(False)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen parameters in `dtype`, and those that train in fp32; LayerNorms too.

    Under autocast a LayerNorm gets fp32 hidden states behind an fp32 embedding, and on a CPU it takes no two dtypes.
    """
    kept = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    for parameter in model.parameters():
        in_fp32 = parameter.requires_grad or id(parameter) in kept
        parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype)


def hash_frozen(model: nn.Module) -> dict[str, str]:
    """`hash_parameters` of the frozen ones.

    Checkpoints leave frozen weights out and record this instead, so that a resume can tell another base.
    """
    return hash_parameters(model, {name for name, parameter in model.named_parameters() if not parameter.requires_grad})


def hash_parameters(model: nn.Module, names: set[str]) -> dict[str, str]:
    """sha256 of dtype, shape and bytes of an unsharded model's parameters, by name."""
    hashes = {}
    for name, parameter in sorted(model.named_parameters()):
        if name in names:
            digest = hashlib.sha256(hash_header(parameter).encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
            hashes[name] = digest.hexdigest()
    return hashes


def hash_header(parameter: torch.Tensor) -> str:
    """What a parameter's hash begins with."""
    return f"{parameter.dtype} {tuple(parameter.shape)}"
