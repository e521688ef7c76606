"""Replaces CPU kernels by stand-ins for CUDA's during a trace, because they keep other tensors for the backward.

Fused attention keeps no scores, dropout a boolean mask, and a norm its input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from toolkit.models.patches import documents

MASK_MULTIPLE = 16
"""The memory-efficient kernel pads an attention bias to a multiple of this many columns."""


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Context in which `torch.nn.functional` and attention by document use the stand-ins."""

    def varlen_attention(module: Any, query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
        """The varlen kernel keeps the same as the others, and no mask."""
        return _fused_attention(query, key, value).transpose(1, 2)

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    with (
        mock.patch.object(documents, "attend_by_document", varlen_attention),
        mock.patch.object(F, "scaled_dot_product_attention", _fused_attention),
        mock.patch.object(F, "dropout", dropout),
        mock.patch.object(F, "rms_norm", lambda hidden, _, weight, __: _Norm.apply(hidden, weight)),
    ):
        yield


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **_: Any,
) -> torch.Tensor:
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype) if is_bool else attn_mask.to(query.dtype)
    return _Attention.apply(query, key, value, attn_mask, dropout_p)


def _allocate(query: torch.Tensor, value: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp of each row of scores."""
    # All fused kernels lay out the output as (rows, tokens, heads, size), so that joining the heads needs no copy.
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
    return output, torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


# One kernel for selective checkpointing, which knows sdpa's by their names.
_kernel = torch.library.custom_op("toolkit_plan::_scaled_dot_product_stand_in", _allocate, mutates_args=())
_kernel.register_fake(_allocate)


class _Norm(torch.autograd.Function):
    """Keeps what the kernel of `torch.nn.functional.rms_norm` keeps: its input, and the inverse norm of each token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, torch.empty((*hidden.shape[:-1], 1), dtype=torch.float32, device=hidden.device))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


class _Attention(torch.autograd.Function):
    """Keeps what the flash and memory-efficient kernels keep: inputs, output, and the log-sum-exp of each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any, dropout_p: float) -> torch.Tensor:
        output, log_sums = _kernel(query, value, dropout_p)
        ctx.save_for_backward(query, key, value, bias, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, bias, _, _ = ctx.saved_tensors
        bias_grad = None
        if ctx.needs_input_grad[3]:
            columns = -(-bias.shape[-1] // MASK_MULTIPLE) * MASK_MULTIPLE
            whole = bias.new_empty(*query.shape[:-1], columns)[..., : bias.shape[-1]]
            bias_grad = whole.sum_to_size(bias.shape)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias_grad, None
