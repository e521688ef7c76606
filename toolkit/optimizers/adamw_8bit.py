"""AdamW with moments in 8 bits (Dettmers et al. 2021), with torchao's maps, scales and formula.

A row of a weight, or of each expert's, is cut into blocks, each with an fp32 scale, its largest element; a code is the place of
a number in a map of 256 from -1 or 0 to 1. torchao cuts a rank's shard into blocks instead, so that its state changes with the
number of ranks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from toolkit.optimizers import adamw
from toolkit.optimizers.state import Layout, Part, Shape

if TYPE_CHECKING:
    import torch

    from toolkit.optimizers.stepping import Shard, Sum

TITLE = "8-bit AdamW"
DEFAULTS = adamw.DEFAULTS
TAKES_FLAT = False

BLOCK_ELEMENTS, FEWEST_BLOCK_ELEMENTS = 256, 64
"""torchao's, and the fewest where that does not divide a row."""
FEWEST_ELEMENTS = 4096
"""Smaller weights keep their moments in fp32, as in bitsandbytes and torchao."""
SMALLEST_SCALE = 1e-12
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether a moment has a sign."""


def layout(shape: Shape) -> Layout:
    """Codes and scales of both moments, or both in fp32; and the number of updates."""
    step = {"step": Part(())}
    rows = shape[:2] if len(shape) == 3 else shape[:1]
    row = math.prod(shape[len(rows) :])
    block = math.gcd(row, BLOCK_ELEMENTS)
    if math.prod(shape) < FEWEST_ELEMENTS or block < FEWEST_BLOCK_ELEMENTS:
        return {name: Part(shape) for name in MOMENTS} | step
    codes = {name: Part(shape, "uint8") for name in MOMENTS}
    return codes | {f"{name}_scale": Part((*rows, row // block), num_shared=len(rows)) for name in MOMENTS} | step


def write_out(
    settings: Any, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
) -> tuple[Any, dict[str, Any]]:
    """As `Optimizer.write_out`; a code stands between two whole ones where the moment stands between two numbers of the map."""
    import numpy as np
    import torch

    part = layout(weight.shape).get("exp_avg_scale")
    if part is None:
        return adamw.write_out(settings, weight, gradient, state, step, lr, weight_decay)
    maps = {name: _values(is_signed, torch.device("cpu")).numpy().astype(np.float64) for name, is_signed in MOMENTS.items()}
    before = {}
    for name in MOMENTS.keys() & state.keys():
        scale = state[f"{name}_scale"].reshape(-1, 1)
        before[name] = (maps[name][state[name].astype(int)].reshape(len(scale), -1) * scale).reshape(weight.shape)
    change, after = adamw.write_out(settings, weight, gradient, before, step, lr, weight_decay)
    for name in MOMENTS:
        blocks = after[name].reshape(math.prod(part.shape), -1)
        scale = np.maximum(np.abs(blocks).max(-1), SMALLEST_SCALE)
        after[f"{name}_scale"] = scale.reshape(part.shape)
        after[name] = np.interp(blocks / scale[:, None], maps[name], np.arange(256.0)).reshape(weight.shape)
    return change, after


def update(settings: Any, shards: list[Shard], skip: torch.Tensor, _: Sum) -> None:
    """Update all shards; in the order of torchao's `single_param_adam`, so that each number is rounded as there."""
    for shard in shards:
        step, lr = shard.state["step"] + 1, shard.lr
        first_correction, second_correction = 1 - settings.beta1**step, (1 - settings.beta2**step).sqrt()
        for piece in shard.pieces():
            first = _decode(piece.state, "exp_avg").lerp(piece.gradient, 1 - settings.beta1)
            second = _decode(piece.state, "exp_avg_sq").lerp(piece.gradient.square(), 1 - settings.beta2)
            root = second.sqrt().div_(second_correction).add_(settings.eps)
            weight = piece.weight - lr * shard.weight_decay * piece.weight
            weight = weight - lr * (first / first_correction) / root
            piece.put(skip, weight, **_encode(piece.state, "exp_avg", first), **_encode(piece.state, "exp_avg_sq", second))
        shard.state["step"] += ~skip


def _decode(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A flat fp32 moment."""
    if f"{name}_scale" not in state:
        return state[name]
    scale = state[f"{name}_scale"].unsqueeze(1)
    values = _values(MOMENTS[name], scale.device).index_select(0, state[name].int())
    return values.view(len(scale), -1).mul_(scale).view(-1)


def _encode(state: dict[str, torch.Tensor], name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a flat fp32 moment: codes of the nearest numbers, and scales."""
    if f"{name}_scale" not in state:
        return {name: moment}
    blocks = moment.view(len(state[f"{name}_scale"]), -1)
    scale = blocks.abs().amax(1).clamp_(min=SMALLEST_SCALE)
    return {name: _nearest((blocks / scale.unsqueeze(1)).view(-1), MOMENTS[name]), f"{name}_scale": scale}


def _nearest(numbers: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """The codes of flat fp32 numbers up to 1."""
    import torch

    codes = _first_codes(is_signed, numbers.device).index_select(0, numbers.view(torch.int32) >> 16 & 0xFFFF)
    codes += numbers >= _bounds(is_signed, numbers.device).index_select(0, codes)
    return codes.to(torch.uint8)


@functools.cache
def _values(is_signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 numbers of a map, ascending, fp32: seven decades, each twice as fine as the smaller one, and 0 and 1."""
    import torch

    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1)
        means = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += [means, -means] if is_signed else [means]
    return torch.cat(values).sort().values.to(device)


@functools.cache
def _bounds(is_signed: bool, device: torch.device) -> torch.Tensor:
    """The least numbers that torchao rounds up to the second, third, … number of the map, by half a gap or more; infinity."""
    import torch

    values = _values(is_signed, torch.device("cpu"))
    lower, half = values[:-1], values.diff() * 0.5
    bounds = lower + half
    for _ in range(2):  # by a bit, because the sum is rounded
        below = bounds.nextafter(lower)
        bounds = torch.where(below - lower >= half, below, bounds)
        bounds = torch.where(bounds - lower < half, bounds.nextafter(values[1:]), bounds)
    return torch.cat([bounds, torch.tensor([torch.inf])]).to(device)


@functools.cache
def _first_codes(is_signed: bool, device: torch.device) -> torch.Tensor:
    """By the upper 16 bits of fp32 numbers, the code of the least of them; of the others it is that or the next one."""
    import torch

    keys = torch.arange(2**16)
    least = torch.where(keys < 2**15, keys << 16, (keys << 16) + 0xFFFF - 2**32).int().view(torch.float32)
    return torch.bucketize(least, _bounds(is_signed, torch.device("cpu"))[:-1], right=True, out_int32=True).to(device)
