"""Which attention a model runs on a device, and whether it attends to packed rows document by document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.models import documents
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
OLDEST_GPU = (8, 0)
"""torch's flash kernel: head sizes up to 256, multiples of 8 (sdpa pads others, the varlen call does not), GPUs from Ampere on.
Source: `check_flash_attention_hardware_support` and `check_head_dim_size_flash` in torch's sdp_utils.cpp."""


def choose_packed_attention(
    model: PreTrainedModel, named: str | None, device_type: str, dtype: torch.dtype, *, is_one_graph: bool = False
) -> str:
    """Let the model attend to packed rows document by document, where its code and the device can. Changes its config in place.

    Args:
        named: `model.attn_implementation`. An attention that the user names stays.
        dtype: that of the computation.
        is_one_graph: blocks are compiled with `fullgraph`, so that nothing in them may run uncompiled.

    Returns:
        Why packed rows get a dense mask; empty if they get none.
    """
    name = type(model).__name__
    if _has_flash(model):
        return ""
    if named is not None:
        return f"model.attn_implementation is {named} (leave it out, and packed rows are attended to document by document)"
    if private("_attn_implementation", model.config) != "sdpa":
        return f"{name} has no sdpa (a soft cap, sinks or an attention of its own)"
    # Code that also works with flash attention makes its masks by transformers' functions, and does not look into them.
    if not (private("_supports_attention_backend", model) and private("_supports_flash_attn", model)):
        return f"{name} has attention or masks of its own"
    if is_one_graph:
        return "dynamo_use_fullgraph allows nothing uncompiled in a block"
    if device_type == "cuda" and (why := _why_no_varlen(model, dtype)):
        return why
    documents.register()
    model.set_attn_implementation(documents.BY_DOCUMENT)
    return ""


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether packed rows must form one row of the tensors; see `CausalCollator`."""
    return _has_flash(model) or private("_attn_implementation", model.config) == documents.BY_DOCUMENT


def describe_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, packing: bool) -> str:
    """The attention that will run on this device, in words; `dtype` is that of the computation.

    Source: `use_flash_attention` and `priority_order` in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    name = private("_attn_implementation", model.config) or "of its own"
    if name == documents.BY_DOCUMENT:
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
    return (
        f"attention {name} keeps packed rows apart by a dense mask, because {why_dense}: it costs what full rows of "
        "data.max_length_tokens cost"
    )


def _has_flash(model: PreTrainedModel) -> bool:
    return "flash" in (private("_attn_implementation", model.config) or "")


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
