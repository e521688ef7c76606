"""Which attention a model runs on a device, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.models.patches.documents import BY_DOCUMENT
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
