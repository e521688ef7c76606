"""Lion (Chen et al. 2023, algorithm 2): one moment, and steps of one size, in the direction of a sign."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.optimizers.state import Layout, Part, Shape

if TYPE_CHECKING:
    import torch

    from toolkit.optimizers.stepping import Shard, Sum

TITLE = "Lion"
DEFAULTS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99}
TAKES_FLAT = True


def layout(shape: Shape) -> Layout:
    """One fp32 moment."""
    return {"exp_avg": Part(shape)}


def write_out(
    settings: Any, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
) -> tuple[Any, dict[str, Any]]:
    """As `Optimizer.write_out`."""
    import numpy as np

    moment = state.get("exp_avg", np.zeros_like(gradient))
    direction = np.sign(settings.beta1 * moment + (1 - settings.beta1) * gradient)
    return -lr * (direction + weight_decay * weight), {"exp_avg": settings.beta2 * moment + (1 - settings.beta2) * gradient}


def update(settings: Any, shards: list[Shard], skip: torch.Tensor, _: Sum) -> None:
    """Update all shards, piece by piece."""
    beta1, beta2 = settings.beta1, settings.beta2
    for shard in shards:
        for piece in shard.pieces():
            moment = piece.state["exp_avg"]
            direction = (moment * beta1 + piece.gradient * (1 - beta1)).sign_()
            weight = piece.weight * (1 - piece.lr * piece.weight_decay) - direction * piece.lr
            piece.put(skip, weight, exp_avg=moment * beta2 + piece.gradient * (1 - beta2))
