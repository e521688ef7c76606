"""Makes a causal model's forward return the summed loss, computed in chunks of tokens without holding all logits.

The loss is computed inside the forward because, under FSDP, the output head's weights are gathered only there.

Shapes: `B` rows, `T` positions, `D` hidden size, `V` vocabulary, `N` label tokens, `n` label tokens of one chunk.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from toolkit.loss import chunked_cross_entropy

MAX_LOGITS_AT_ONCE = 2**26
"""Most elements of one chunk's logits on a CPU: 256 MiB in fp32, or 512 tokens of a vocabulary of 128k."""
FEWEST_LOGITS_AT_ONCE = 2**24
"""On a GPU below 8 GiB: smaller products would not fill it."""
CHUNK_SHARE = 0.01
"""Most of a GPU's memory that one chunk's logits take in fp32. Loss and backward hold about three times that."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def max_logits_at_once(gpu_bytes: int) -> int:
    """Most elements of one chunk's logits on a GPU of this memory: the largest power of two within `CHUNK_SHARE` of it.

    GPUs of one kind report slightly different memory; by powers of two their chunks are equal.
    """
    return max(FEWEST_LOGITS_AT_ONCE, 2 ** int(math.log2(gpu_bytes * CHUNK_SHARE / torch.float32.itemsize)))


def install(model: PreTrainedModel, max_logits: int | None = None) -> None:
    """Make `model(input_ids=…, label_positions=…, labels=…, label_smoothing=…)` return `(loss_sum, num_correct)`, in place.

    Without `label_positions` the forward is transformers' own, as `generate` needs it. Encoder-decoders and models that are
    not from transformers stay unchanged.

    Args:
        max_logits: most elements of one chunk's logits; None: `MAX_LOGITS_AT_ONCE`.
    """
    if not hasattr(model, "config") or model.config.is_encoder_decoder:
        return
    forward = model.forward

    @functools.wraps(forward)  # generate inspects its signature
    def forward_or_loss(*args: Any, label_positions: torch.Tensor | None = None, **inputs: Any) -> Any:
        if label_positions is None:
            return forward(*args, **inputs)
        return _summed_loss(model, max_logits or MAX_LOGITS_AT_ONCE, label_positions, **inputs)

    model.forward = forward_or_loss


def _summed_loss(
    model: PreTrainedModel,
    max_logits: int,
    label_positions_N: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    **inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the loss over the label tokens, and the number predicted correctly; scalars.

    Args:
        label_positions_N: int64, indices into the flattened (B, T).
        labels: int64, (N,).
        inputs: the forward's arguments; tensors of shape (B, T).
    """
    backbone = getattr(model, model.base_model_prefix)
    hidden_BTD = backbone(**inputs).last_hidden_state
    # The collator computes the positions: indexing by a mask would be a host sync.
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, label_positions_N)
    vocab_size = model.config.get_text_config().vocab_size
    head = functools.partial(_logits, model)
    return chunked_cross_entropy(hidden_ND, labels, head, vocab_size, max_logits, label_smoothing)


def _logits(model: PreTrainedModel, hidden_nD: torch.Tensor) -> torch.Tensor:
    """The model's own logits (n, V) for hidden states (n, D): its class's forward around a backbone that returns these.

    Models scale or cap their logits differently (Gemma 2 by tanh, Cohere by a factor), so their own code must run.
    """
    return type(model).forward(_WithBackbone(model, hidden_nD), input_ids=None, use_cache=False).logits[0]


class _WithBackbone:
    """Stands in for the model in its own forward, with a backbone that returns given hidden states."""

    def __init__(self, model: PreTrainedModel, hidden_nD: torch.Tensor) -> None:
        self._model, self._hidden_BTD = model, hidden_nD[None]

    def __getattr__(self, name: str) -> Any:
        return self._backbone if name == self._model.base_model_prefix else getattr(self._model, name)

    def _backbone(self, *args: Any, **inputs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self._hidden_BTD)
