"""What a user's Python code may add to a run: a model, metrics, a loss, and two hooks. `finetune` takes them as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.errors import UserError
from toolkit.evaluation.metrics import TextFunction
from toolkit.training.own_loss import OwnLoss


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
    """Of the global batch, in nats per label token; None unless the step is logged (`log_every_steps`): a read waits for the
    device."""
    model: nn.Module
    """As it is trained: under FSDP its parameters are this rank's shards (`DTensor`s under FSDP2)."""
    optimizer: torch.optim.Optimizer


class Figures(dict[str, Any]):
    """The figures of an evaluation, and its `step`; the argument of the hook `after_evaluation`."""

    model: nn.Module
    """As in `StepInfo`."""
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class Own:
    """The user's model and functions of one run."""

    model: Any = None
    """A class, or a built model."""
    given: Any = None
    """The dataset whose rows are evaluated, or held out from, if Python code has given it."""
    metrics: Mapping[str, TextFunction] = field(default_factory=dict)
    loss: OwnLoss | None = None
    after_step: Callable[[StepInfo], object] | None = None
    after_evaluation: Callable[[Figures], object] | None = None


def check_own(config: RecipeConfig, own: Own) -> None:
    """Check the functions against the config.

    Raises:
        UserError: something is not a function, or metrics are given to a run that generates no texts.
    """
    if not isinstance(own.metrics, Mapping):
        raise UserError(f"metrics is {own.metrics!r:.60}: give functions by their names; eval.metrics names modules")
    functions: dict[str, Any] = {"loss": own.loss, "after_step": own.after_step, "after_evaluation": own.after_evaluation}
    functions |= {f"metrics[{name!r}]": function for name, function in own.metrics.items()}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UserError(f"{name} is a {type(function).__name__}, and cannot be called: give a function")
    if own.loss is not None and config.optim.label_smoothing:
        raise UserError(
            f"optim.label_smoothing is {config.optim.label_smoothing}, but loss takes the place of cross-entropy: smooth there, "
            "or leave one of them out"
        )
    names = [*config.eval.metrics, *own.metrics]
    if names and not config.eval.generate:
        raise UserError(f"metrics {', '.join(names)} score generated texts: set eval.generate to true")
