"""A loss of the user's own: a function of all logits of a micro-batch and their labels, summed over the label tokens.

Training divides the sum by the label tokens of the global batch, as it does with cross-entropy. Evaluation keeps cross-entropy.

Shapes: `B` rows, `T` positions, `V` vocabulary, `N` label tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from toolkit.data.collate import Batch, labels_at_positions
from toolkit.errors import UserError
from toolkit.loss import IGNORED_LABEL

OwnLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits BTV in the dtype of the computation, labels BT int64 with `IGNORED_LABEL`) → a scalar, the sum over the label tokens.
`logits[b, t]` predicts `labels[b, t]`: labels of a causal model are shifted already."""
_TOLERANCE = 1e-3


def summed_own_loss(model: nn.Module, batch: Batch, loss: OwnLoss) -> torch.Tensor:
    """`loss` of a micro-batch, a scalar. All its logits are in memory at once. Collective under FSDP.

    Args:
        batch: a collator's output, on the device. Without `label_positions`, the model returns its logits.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "label_positions")}
    logits_BTV = model(**inputs, use_cache=False).logits
    return loss(logits_BTV, labels_at_positions(batch))


def check_own_loss(loss: OwnLoss, vocab_size: int, device: torch.device) -> None:
    """Check on random logits that the loss is a sum over label tokens, without which it would depend on the micro-batch size.

    Raises:
        UserError: it returns no scalar with a gradient, is not 0 without label tokens, or twice the rows do not double it.
    """
    random = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(2, 5, vocab_size, generator=random).to(device).requires_grad_()
    labels_BT = torch.randint(vocab_size, (2, 5), generator=random).to(device)
    labels_BT[1, 3:] = IGNORED_LABEL
    once = loss(logits_BTV, labels_BT)
    if not isinstance(once, torch.Tensor) or once.ndim or not once.requires_grad:
        shown = f"a tensor of shape {tuple(once.shape)}" if isinstance(once, torch.Tensor) else type(once).__name__
        raise UserError(f"the loss returned {shown}: return a scalar tensor that depends on the logits")
    twice = loss(logits_BTV.repeat(2, 1, 1), labels_BT.repeat(2, 1)).item()
    if not abs(twice - 2 * once.item()) <= _TOLERANCE * abs(2 * once.item()):
        raise UserError(
            f"the loss of twice the rows is {twice:.6g}, and of the rows once {once.item():.6g}: return the sum over the label "
            "tokens, not their mean"
        )
    without = loss(logits_BTV, torch.full_like(labels_BT, IGNORED_LABEL)).item()
    if without != 0:
        raise UserError(
            f"the loss of rows without a label token is {without:.6g}, not 0: leave out the labels that are {IGNORED_LABEL}"
        )
