"""Token-exact loss: a sum over label tokens, divided by the label tokens of the whole global batch.

Shapes: `B` rows, `T` target positions, `V` vocabulary, `N` label tokens of the global batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100
"""Label of a position that does not count; the value transformers uses."""


def summed_cross_entropy(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Sum over label tokens of -log p(label), in fp32 nats; a scalar.

    transformers' T5 computes the *mean* over its own micro-batch and ignores `num_items_in_batch`
    (transformers#47688), so that its loss depends on how a batch is cut. A sum does not.

    Args:
        logits_BTV: float logits, any floating dtype.
        labels_BT: int64 labels; `IGNORED_LABEL` does not count.
    """
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def share_of_global_mean(loss_sum: torch.Tensor, num_label_tokens: int, world_size: int) -> torch.Tensor:
    """What one rank backpropagates so that averaged gradients are those of `global sum / N`.

    DDP and FSDP divide summed gradients by the number of ranks; the factor `world_size` takes that back.
    """
    return loss_sum * (world_size / num_label_tokens)
