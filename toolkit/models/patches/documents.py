"""Attention of packed rows, document by document: no token attends across documents, and no mask over all tokens is made.

Replaces: transformers' sdpa attention and its mask, in models whose code allows it (`choose_packed_attention`).
Why: a dense mask costs what full rows cost, and forbids the flash kernel.
Until: transformers' sdpa takes the lengths of documents, as its flash attention does (5.24 does not).

Registered with transformers as the attention `documents`. A mask function of transformers then returns `Documents` in place of
a mask (`masks.py` notes them), which reaches `attend` as every mask does, in a recomputation too. Masks of any other kind, and
calls without packed rows, are those of sdpa.

Shapes: `T` tokens of all documents in one row, `H` heads of queries, `K` of keys and values, `D` head size, `N` documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BY_DOCUMENT = "documents"
"""Name of the attention in a model's config."""
LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
OLDEST_GPU = (8, 0)
"""torch's flash kernel: head sizes up to 256, multiples of 8 (sdpa pads others, the varlen call does not), GPUs from Ampere on.
Source: `check_flash_attention_hardware_support` and `check_head_dim_size_flash` in torch's sdp_utils.cpp."""


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a row. Each token attends to itself and the tokens before it in its document."""

    lengths: tuple[int, ...]
    """In tokens, in order; they add up to T."""
    starts_N1: torch.Tensor
    """The first token of each document, and T; int32 on the device."""
    window: int | None = None
    """Most tokens that a token attends to, itself included; None: all."""


def choose_packed_attention(
    model: PreTrainedModel, named: str | None, device_type: str, dtype: torch.dtype, *, is_one_graph: bool = False
) -> str:
    """Let the model attend to packed rows document by document, where its code and the device can. Changes its config in place.
    Returns why packed rows get a dense mask; empty if they get none.

    The attention that `model.attn_implementation` has `named` stays. The computation is in `dtype`. With `is_one_graph`, blocks
    are compiled with `fullgraph`, so that nothing in them may run uncompiled.
    """
    name, attention = type(model).__name__, private("_attn_implementation", model.config) or ""
    if "flash" in attention:
        return ""
    if named is not None:
        return f"model.attn_implementation is {named} (leave it out, and packed rows are attended to document by document)"
    if attention != "sdpa":
        return f"{name} has no sdpa (a soft cap, sinks or an attention of its own)"
    # Code that also works with flash attention makes its masks by transformers' functions, and does not look into them.
    if not (private("_supports_attention_backend", model) and private("_supports_flash_attn", model)):
        return f"{name} has attention or masks of its own"
    if is_one_graph:
        return "dynamo_use_fullgraph allows nothing uncompiled in a block"
    if device_type == "cuda" and (why := _why_no_varlen(model, dtype)):
        return why
    register()
    model.set_attn_implementation(BY_DOCUMENT)
    return ""


def describe_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, packing: bool) -> str:
    """The attention that will run on this device, in words; `dtype` is that of the computation.

    Source: `use_flash_attention` and `priority_order` in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    name = private("_attn_implementation", model.config) or "of its own"
    if name == BY_DOCUMENT:
        how = "torch's varlen kernel" if device.type == "cuda" else "one causal sdpa each"
        return f"sdpa, and packed rows document by document ({how}): no mask, and no cost of full rows"
    if name != "sdpa" or device.type != "cuda":
        return name
    if not (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()):
        return "sdpa, torch's math kernel"
    or_cudnn = " or cuDNN's" if torch.backends.cuda.cudnn_sdp_enabled() else ""
    if packing or model.config.is_encoder_decoder:
        why = "keeps packed rows apart" if packing else "has padding or position biases"
        return f"sdpa with a dense mask, which {why}: no flash kernel, but the memory-efficient one{or_cudnn}"
    return f"sdpa, the flash kernel{or_cudnn}" if dtype == torch.bfloat16 else "sdpa in fp32: the memory-efficient kernel"


def warn_of_full_rows(model: PreTrainedModel, why_dense: str) -> str | None:
    """The warning that attention costs full rows in packed ones; None where it costs what their texts cost."""
    name = private("_attn_implementation", model.config) or "of its own"
    if not why_dense or "flex" in name:
        return None
    return f"attention {name} keeps packed rows apart by a dense mask, because {why_dense}: as costly as full rows"


def register() -> None:
    """Make the attention known to transformers in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(BY_DOCUMENT, attend)
    AttentionMaskInterface.register(BY_DOCUMENT, build_mask)


def build_mask(**options: Any) -> Documents | torch.Tensor | None:
    """What `attend` gets as its mask: the documents that the mask function stands for, else sdpa's mask, with all its costs."""
    from transformers import masking_utils

    documents: Documents | None = getattr(options.get("mask_function"), "documents", None)
    return documents or masking_utils.sdpa_mask(**options)


def attend(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: Documents | torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; without documents it is sdpa's. Returns the output (1, T, H, D), and None in place of
    the weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, Documents):
        return sdpa_attention_forward(module, query_1HTD, key_1KTD, value_1KTD, attention_mask, **options)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    assert not unknown, f"attention by document has no {unknown[0]}"
    dropout, scaling = options.get("dropout", 0.0), options.get("scaling")
    return attend_by_document(module, query_1HTD, key_1KTD, value_1KTD, attention_mask, dropout, scaling), None


@torch.compiler.disable  # lengths differ in every batch: compiled blocks would compile again for each
def attend_by_document(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    documents: Documents,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention within each document, (1, T, H, D): torch's varlen kernel on CUDA, else document after document."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert query_1HTD.shape[0] == 1 and query_1HTD.shape[2] == sum(documents.lengths)
    if query_1HTD.is_cuda and not dropout:
        return _varlen(query_1HTD, key_1KTD, value_1KTD, documents, scaling)
    # `split`, because the backward of slices would add up one full-size gradient a document.
    parts = zip(*(tensor.split(documents.lengths, dim=2) for tensor in (query_1HTD, key_1KTD, value_1KTD)), strict=True)
    outputs = []
    for length, (query, key, value) in zip(documents.lengths, parts, strict=True):
        mask = None
        if documents.window is not None and length > documents.window:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril().triu(1 - documents.window)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=True)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _varlen(
    query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention import varlen

    query_THD, key_TKD, value_TKD = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1KTD, value_1KTD))
    longest = max(documents.lengths)
    # The kernel's window is the number of tokens before a token; -1 is all of them.
    before = -1 if documents.window is None or documents.window >= longest else documents.window - 1
    output_THD: Any = varlen.varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        documents.starts_N1,
        documents.starts_N1,
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0),
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return output_THD[None]


def _why_no_varlen(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Why torch's varlen kernel cannot compute this model's attention; empty if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return "torch's varlen kernel computes in bf16 and fp16 only"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_GPU:
        return "torch's varlen kernel needs a GPU of the Ampere generation or later"
    # transformers names every attention so.
    modules = [module for module in model.modules() if "Attention" in type(module).__name__]
    rates = [getattr(module, name, 0.0) for module in modules for name in ("attention_dropout", "attn_dropout", "dropout")]
    if rate := max((float(getattr(rate, "p", rate) or 0.0) for rate in rates), default=0.0):  # a number or an `nn.Dropout`
        return f"torch's varlen kernel has no attention dropout, and the model's is {rate:g} (model.dropout 0 turns it off)"
    for module in modules:
        named = (getattr(module, name, None) for name in ("head_dim", "head_size", "qk_head_dim", "v_head_dim"))
        sizes = {size for size in named if isinstance(size, int)}  # two where keys and values differ
        if len(sizes) != 1 or not all(size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0 for size in sizes):
            return f"torch's varlen kernel does not take head sizes of {type(module).__name__} ({sorted(sizes) or 'unknown'})"
    return "" if modules else "the model does not say its head size"
