"""What a user's Python code may add to a run: a model, metrics, a loss, and two hooks. `finetune` takes them as arguments.

The loss is a function of all logits of a micro-batch and their labels, summed over the label tokens. Training divides the sum by
the label tokens of the global batch, as it does with cross-entropy. Evaluation keeps cross-entropy.

Shapes: `B` rows, `T` positions, `V` vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.data.collate import Batch, labels_at_positions
from toolkit.errors import UserError
from toolkit.evaluation.metrics import TextFunction
from toolkit.loss import IGNORED_LABEL
from toolkit.objectives.objective import Objective

OwnLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits BTV in the dtype of the computation, labels BT int64 with `IGNORED_LABEL`) → a scalar, the sum over the label tokens.
`logits[b, t]` predicts `labels[b, t]`: labels of a causal model are shifted already."""
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """A step that has just been taken; the argument of the hook `after_step`."""

    step: int
    """1-based."""
    num_steps: int
    """Steps of the run."""
    epoch: int
    """0-based."""
    learning_rate: float
    loss: float | None
    """Of the global batch, in nats per label token; None unless the step is logged (`log_every_steps`), because a read waits for
    the device."""
    model: nn.Module
    """As it is trained. Under FSDP its parameters are this rank's shards, under FSDP2 each a `DTensor`."""
    optimizer: torch.optim.Optimizer


class EvalMetrics(dict[str, Any]):
    """The figures of an evaluation, and its `step`; the argument of the hook `after_evaluation`."""

    model: nn.Module
    """As in `StepInfo`."""
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class UserHooks:
    """The user's model and functions of one run."""

    model: Any = None
    """A class, or a built model."""
    given: Any = None
    """The dataset whose rows are evaluated, or held out from, if Python code has given it."""
    metrics: Mapping[str, TextFunction] = field(default_factory=dict)
    loss: OwnLoss | None = None
    after_step: Callable[[StepInfo], object] | None = None
    after_evaluation: Callable[[EvalMetrics], object] | None = None


def check_hooks(config: RecipeConfig, hooks: UserHooks, objective: Objective) -> None:
    """Check the functions against the config: a `UserError` for what is not a function, metrics of a run that generates no texts,
    or a loss beside that of an objective of the user's."""
    if not isinstance(hooks.metrics, Mapping):
        raise UserError(f"metrics is {hooks.metrics!r:.60}: give functions by their names; eval.metrics names modules")
    functions: dict[str, Any] = {"loss": hooks.loss, "after_step": hooks.after_step, "after_evaluation": hooks.after_evaluation}
    functions |= {f"metrics[{name!r}]": function for name, function in hooks.metrics.items()}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UserError(f"{name} is a {type(function).__name__}, and cannot be called: give a function")
    if hooks.loss is not None and config.optim.label_smoothing:
        what = f"optim.label_smoothing is {config.optim.label_smoothing}, but loss takes the place of cross-entropy"
        raise UserError(f"{what}: smooth there, or leave one of them out")
    if hooks.loss is not None and type(objective).loss is not Objective.loss:
        raise UserError(f"loss is given, and objective {objective.name} has a loss of its own: give one of them")
    names = [*config.eval.metrics, *hooks.metrics]
    if names and not config.eval.generate:
        raise UserError(f"metrics {', '.join(names)} score generated texts: set eval.generate to true")


def summed_own_loss(model: nn.Module, batch: Batch, predicting: str, loss: OwnLoss) -> torch.Tensor:
    """`loss` of a micro-batch, a collator's output on the device: a scalar. Without `label_positions` the model returns logits,
    all of them at once. `predicting` is the name of the inputs whose outputs predict labels. Collective under FSDP."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "label_positions")}
    logits_BTV = model(**inputs, use_cache=False).logits
    return loss(logits_BTV, labels_at_positions(batch, batch[predicting]))


def check_own_loss(loss: OwnLoss, vocab_size: int, device: torch.device) -> None:
    """Check on random logits that the loss is a sum over label tokens, without which it would depend on the micro-batch size. A
    `UserError` if it returns no scalar with a gradient, is not 0 without label tokens, or twice the rows do not double it."""
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
        what = f"the loss of twice the rows is {twice:.6g}, and of the rows once {once.item():.6g}"
        raise UserError(f"{what}: return the sum over the label tokens, not their mean")
    without = loss(logits_BTV, torch.full_like(labels_BT, IGNORED_LABEL)).item()
    if without != 0:
        what = f"the loss of rows without a label token is {without:.6g}, not 0"
        raise UserError(f"{what}: leave out the labels that are {IGNORED_LABEL}")
