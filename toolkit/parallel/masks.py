"""Lets transformers make its attention masks without reading the device, for which the host would wait in every micro-batch.

transformers leaves out a mask that masks nothing, and looks for packed rows; for both it reads tensors back. The collators know
both: they hand over positions only where rows are packed, and a mask only where a row is padded.

Shapes: `B` rows, `T` positions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install(model: PreTrainedModel) -> None:
    """Make `model(…)` on a collator's batch build its masks from what the batch holds, in place.

    Calls with a mask for causal attention or with the encoder's outputs, as `generate` makes them, stay as they are. So do
    models that are not from transformers.
    """
    if not hasattr(model, "config"):
        return
    forward = model.forward
    of_generate = ("encoder_outputs", "decoder_attention_mask") if model.config.is_encoder_decoder else ("attention_mask",)

    @functools.wraps(forward)  # generate inspects its signature
    def forward_with_known_masks(*args: Any, **inputs: Any) -> Any:
        if any(inputs.get(name) is not None for name in of_generate):
            return forward(*args, **inputs)
        with _known_masks(is_packed=inputs.get("position_ids") is not None):
            return forward(*args, **inputs)

    model.forward = forward_with_known_masks
    # GPT-2 and BERT look for padding ids where they get no mask, to warn. Here padding comes last.
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            setattr(module, "warn_if_padding_and_no_attention_mask", _no_warning)  # noqa: B010  # no field that mypy knows


@contextlib.contextmanager
def _known_masks(*, is_packed: bool) -> Iterator[None]:
    """Replace the functions of transformers' masks that read; a version that lacks one keeps its reads.

    The masks are those that transformers itself makes for padded or packed rows.
    """
    from transformers import masking_utils

    ignore_causal = getattr(masking_utils, "_ignore_causal_mask_sdpa", None)

    def find_packed(position_ids_BT: torch.Tensor) -> torch.Tensor | None:
        """Number of each token's packed row, BT; None where no row is packed."""
        before_B1 = position_ids_BT[:, :1] - 1
        return (torch.diff(position_ids_BT, prepend=before_B1) != 1).cumsum(-1) if is_packed else None

    def can_ignore_bidirectional(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    def can_ignore_causal(padding_mask: Any, *sizes: Any, **more: Any) -> bool:
        """No token sees the padding, which comes last. BART's decoder makes a mask of ones where it gets none."""
        return ignore_causal is not None and ignore_causal(None, *sizes, **more)

    known = {
        "find_packed_sequence_indices": find_packed,
        "_ignore_bidirectional_mask_sdpa": can_ignore_bidirectional,
        "_ignore_causal_mask_sdpa": can_ignore_causal,
    }
    kept = {name: getattr(masking_utils, name) for name in known if hasattr(masking_utils, name)}
    for name in kept:
        setattr(masking_utils, name, known[name])
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(masking_utils, name, function)


def _no_warning(*_: Any) -> None:
    pass
