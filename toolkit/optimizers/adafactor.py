"""Adafactor (Shazeer and Stern 2018) as transformers' `Adafactor(relative_step=False)` computes it, without a first moment.

Of a weight's squared gradients it keeps the running mean of each row and of each column; of experts, those of each. A rank has
whole rows, so rows are its own; sums down the columns are reduced over the ranks, except where a rank has whole experts. Vectors
keep all squares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.optimizers.state import Layout, Part, Shape

if TYPE_CHECKING:
    import torch

    from toolkit.optimizers.stepping import Shard, Sum

TITLE = "Adafactor"
DEFAULTS: dict[str, Any] = {"scale_by_weight": False}
TAKES_FLAT = False

DECAY_POWER = 0.8
"""Squares are averaged with a decay of 1 - step ** -DECAY_POWER."""
SQUARES_EPS, SCALE_EPS = 1e-30, 1e-3
CLIP_RMS = 1.0
"""A larger root mean square of an update is scaled down to this."""


def layout(shape: Shape) -> Layout:
    """Row and column means of squares, or all squares of a vector; and the number of updates."""
    step = {"step": Part(())}
    if len(shape) < 2:
        return {"exp_avg_sq": Part(shape), **step}
    columns = Part(shape[:-2] + shape[-1:], num_shared=len(shape) - 2)
    return {"exp_avg_sq_row": Part(shape[:-1]), "exp_avg_sq_col": columns, **step}


def write_out(
    settings: Any, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
) -> tuple[Any, dict[str, Any]]:
    """As `Optimizer.write_out`."""
    import numpy as np

    def average(name: str, new: Any) -> Any:
        return state.get(name, 0) + (new - state.get(name, 0)) * step**-DECAY_POWER

    squares = gradient**2 + SQUARES_EPS
    if gradient.ndim < 2:
        after = {"exp_avg_sq": average("exp_avg_sq", squares)}
        update = gradient / np.sqrt(after["exp_avg_sq"])
    else:
        names = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}
        after = {name: average(name, squares.mean(axis)) for name, axis in names.items()}
        rows, columns = after.values()
        update = gradient / np.sqrt((rows / rows.mean(-1, keepdims=True))[..., None] * columns[..., None, :])
    update = update / max(1.0, np.sqrt(np.mean(update**2)) / CLIP_RMS)
    scale = max(SCALE_EPS, np.sqrt(np.mean(weight**2))) if settings.scale_by_weight else 1.0
    return -lr * scale * (weight_decay * weight + update), after


def update(settings: Any, shards: list[Shard], skip: torch.Tensor, add_up: Sum) -> None:
    """Update all shards, with two all-reduces; gradients in fp32 become updates in place. Collective."""
    # 1. This rank's squares. Means of rows are complete; means of columns and over all rows are not.
    kept, parts = zip(*(_average_squares(shard) for shard in shards), strict=True)
    totals = iter(add_up([part for of_shard in parts for part in of_shard]))
    # 2. The updates, whose root mean square is limited: gradients times factors.
    weight_squares, factors = [], []
    for shard, state in zip(shards, kept, strict=True):
        column_means, row_mean, squares = (next(totals).float() for _ in range(3))
        weight_squares.append(squares)
        if len(shard.shape) < 2:
            factors.append([state["exp_avg_sq"].rsqrt()])
            continue
        rows = state["exp_avg_sq_row"]
        if _is_cut_by_rows(shard):
            state["exp_avg_sq_col"] = shard.state["exp_avg_sq_col"].lerp(column_means, _rate(state))
            row_mean = row_mean.unsqueeze(-1)
        else:
            row_mean = _exact(shard, rows).mean(-1).float().unsqueeze(-1)
        factors.append([(rows / row_mean).rsqrt().unsqueeze(-1), state["exp_avg_sq_col"].rsqrt().unsqueeze(-2)])
    update_squares = add_up([_exact(shard, _scale(shard, by).square()).sum() for shard, by in zip(shards, factors, strict=True)])
    # 3. The weights. Updates of gradients in bf16 are computed again: those of all weights would take 4 bytes a parameter.
    for shard, by, state, of_weight, of_update in zip(shards, factors, kept, weight_squares, update_squares, strict=True):
        size, of_update = math.prod(shard.shape), of_update.float()
        lr = (of_weight / size).sqrt().clamp(min=SCALE_EPS) * shard.lr if settings.scale_by_weight else shard.lr
        scaled = shard.gradient if shard.given.dtype == weight_squares[0].dtype else _scale(shard, by)
        update = scaled / ((of_update / size).sqrt() / CLIP_RMS).clamp(min=1.0)
        shard.put(skip, shard.weight - (shard.weight * shard.weight_decay + update) * lr, **state)


def _scale(shard: Shard, factors: list[torch.Tensor]) -> torch.Tensor:
    """The fp32 gradient times the factors; one that is given in fp32 is overwritten."""
    scaled = shard.gradient
    for factor in factors:
        scaled.mul_(factor)
    return scaled


def _exact(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """What is summed over all rows; of a weight in bf16 in fp64, so that ranks that cut it otherwise round its updates alike."""
    return tensor if shard.rounding is None else tensor.double()


def _average_squares(shard: Shard) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The state after the step, as far as this rank's rows tell it, and this rank's parts of three sums over all rows:
    of a matrix's squares by column and of its row means, both over the number of rows, and of the weight's squares."""
    state = {"step": shard.state["step"] + 1}
    rate, squares = _rate(state), shard.gradient.square().add_(SQUARES_EPS)
    parts = [squares.new_zeros(0), squares.new_zeros(0), _exact(shard, shard.weight.square()).sum()]
    if squares.ndim < 2:
        return state | {"exp_avg_sq": shard.state["exp_avg_sq"].lerp(squares, rate)}, parts
    state["exp_avg_sq_row"] = shard.state["exp_avg_sq_row"].lerp(squares.mean(-1), rate)
    if _is_cut_by_rows(shard):
        ways = ((squares, -2), (state["exp_avg_sq_row"], -1))
        parts[:2] = [_exact(shard, part).sum(axis) / shard.shape[-2] for part, axis in ways]
    else:
        state["exp_avg_sq_col"] = shard.state["exp_avg_sq_col"].lerp(_exact(shard, squares).mean(-2).float(), rate)
    return state, parts


def _is_cut_by_rows(shard: Shard) -> bool:
    """Whether ranks may share the columns of a matrix, or of each expert's."""
    return len(shard.shape) == 2 or shard.given.shape[-2] < shard.shape[-2]


def _rate(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The share of this step's squares in the averages."""
    return state["step"].pow(-DECAY_POWER)
