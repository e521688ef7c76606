"""Layers that mix tokens along a row other than by attention, on packed rows: state spaces, delta rules, linear attention and
short convolutions start afresh at each document.

Replaces: the forward of these layers, for a batch that says where its documents lie.
Why: their states and convolutions would go on from one document to the next. transformers keeps documents apart only in three
families, and only by kernels of fla and causal-conv1d.
Until: transformers' layers take the lengths of documents without these kernels (5.24 does not).

Shapes: `T` tokens of all documents in one row, `N` documents.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.models.patches.documents import Documents

WITHOUT_CONVOLUTION = (
    "Inkling2DynamicShortConvolution", "MiniMaxLightningAttention", "RwkvSelfAttention", "RwkvFeedForward", "xLSTMLayer",
)  # fmt: skip
"""Classes of such layers. All others hold a convolution over the row."""
OF_THE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of flash attention, which a model hands down to every layer."""

SHORT_ROW_TOKENS = 64
"""With fewer on average, a call for each row costs about what packing saves."""


@dataclass
class Current:
    """The documents of the model's last forward, which a recomputation in its backward meets too."""

    documents: Documents | None = None


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of this kind."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        mixes = any("Conv1d" in type(child).__name__ for child in module.children())
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and (mixes or type(module).__name__ in WITHOUT_CONVOLUTION):
            found[name] = module
    return list(found.values())


def install(model: nn.Module) -> Current:
    """Let such layers of the model compute document by document, in place, as what this returns says."""
    current = Current()
    for layer in find_layers(model):
        layer.forward = functools.partial(_forward, layer.forward, current, takes_starts(layer))
    return current


def takes_starts(layer: nn.Module) -> bool:
    """Whether the layer's kernels keep documents apart, both of them installed; transformers then calls them on every device."""
    has_kernels = all(importlib.util.find_spec(package) for package in ("fla", "causal_conv1d"))
    return has_kernels and "cu_seq_lens_q" in inspect.getsource(type(layer))


def warn_of_short_rows(model: nn.Module, mean_tokens: float) -> str | None:
    """The warning that packing may slow the model down; None where it does not. Found on a CPU with Qwen3-Next: rows of 24 tokens
    take 1.7 times as long packed, rows of 128 tokens 0.76 times."""
    num_layers = sum(not takes_starts(layer) for layer in find_layers(model))
    if not num_layers or mean_tokens >= SHORT_ROW_TOKENS:
        return None
    of_layers = f"{num_layers} of the layers of {type(model).__name__} compute one by one"
    return f"rows have {mean_tokens:.0f} tokens on average, which {of_layers}: data.packing false may be faster"


def _forward(forward: Callable[..., Any], current: Current, by_kernel: bool, *args: Any, **inputs: Any) -> Any:
    if current.documents is None:
        return forward(*args, **inputs)
    return _by_document(forward, current.documents, by_kernel, args, inputs)


@torch.compiler.disable  # lengths differ in every batch: compiled blocks would compile again for each
def _by_document(
    forward: Callable[..., Any], documents: Documents, by_kernel: bool, args: tuple[Any, ...], inputs: dict[str, Any]
) -> Any:
    """The layer on all documents by its kernels, or on one after the other: of its arguments, tensors of shape (1, T, …), also in
    tuples, are split."""
    lengths, own = documents.lengths, {name: value for name, value in inputs.items() if name not in OF_THE_ROW}
    if by_kernel:
        # Made on the device: a copy from the host would wait for it. With the size given, nothing is read back either.
        numbers_1T = torch.repeat_interleave(documents.starts_N1.diff(), output_size=sum(lengths))[None]
        return forward(*args, **own, cu_seq_lens_q=documents.starts_N1.long(), seq_idx=numbers_1T)
    parts = zip(*(_split(value, lengths) for value in (*args, *own.values())), strict=True)
    places = len(args)
    outputs = [forward(*part[:places], **dict(zip(own, part[places:], strict=True))) for part in parts]
    return _join(outputs, lengths)


def _split(value: Any, lengths: tuple[int, ...]) -> Sequence[Any]:
    """An argument's part for each document. `split`, because the backward of slices would add up one full-size gradient each."""
    if isinstance(value, tuple) and value:
        return list(zip(*(_split(each, lengths) for each in value), strict=True))
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, sum(lengths)):
        return value.split(lengths, dim=1)
    return [value] * len(lengths)


def _join(outputs: Sequence[Any], lengths: tuple[int, ...]) -> Any:
    """The outputs of the row, of those of its documents; of a state, the last."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(each, lengths) for each in zip(*outputs, strict=True))
    is_by_token = all(isinstance(each, torch.Tensor) for each in outputs)
    is_by_token = is_by_token and all(each.shape[1:2] == (length,) for each, length in zip(outputs, lengths, strict=True))
    return torch.cat(list(outputs), dim=1) if is_by_token else outputs[-1]
