"""The optimizers that torch does not have in a form that shards, skips and resumes exactly: what they share.

Their weights, gradients and state are DTensors under FSDP2; an update gets this rank's shards. It is imported where one is built,
because it imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, zeros
from torch.distributed.tensor.placement_types import Shard as Cut

from toolkit.optimizers.state import Layout, Part, Shape
from toolkit.private import private

PIECE_ELEMENTS = 1 << 24
"""Of a piece: each fp32 temporary takes 64 MiB."""
ROUNDS = ((16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1))
"""Shifts and factors of a hash of 32 bits (github.com/skeeto/hash-prospector, two rounds of xorshift and multiply)."""


@dataclass(frozen=True)
class Rounding:
    """How this rank's shard of a weight in bf16 is rounded in one step: up or down at random, so that the mean is the fp32 value,
    and small updates add up.

    The bits of an element depend on a key and on its position in the full weight, so that ranks round alike however they cut it.
    They are a hash, not a generator's, whose numbers depend on the kernel that draws them.
    """

    key: int
    """Of the seed, the step and the weight's name."""
    offset: int
    """Flat place of the shard's first element in the weight."""
    block: int = 0
    """If it is cut along another dimension than the first: elements of a block of the shard, which is a part of a block of
    `full_block` elements of the weight."""
    full_block: int = 0

    def round(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Flat fp32 values of the shard from its flat place `start` on, in bf16. What is not finite stays so."""
        place = torch.arange(start, start + values.numel(), device=values.device)
        if self.block:
            place = place // self.block * self.full_block + place % self.block
        up = random_bits(place + self.offset, self.key)
        rounded = up.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
        return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight with its gradient and state; without rows, if the weight has fewer than there are ranks."""

    stored: torch.Tensor
    """The weight, in fp32 or bf16."""
    given: torch.Tensor
    """Its gradient, in fp32 or bf16; may be overwritten."""
    state: dict[str, torch.Tensor]
    shape: Shape
    """Of the full weight."""
    lr: float
    weight_decay: float
    rounding: Rounding | None = None
    """Of a weight in bf16."""
    start: int = 0
    """Of a piece, its flat place in the shard."""

    @property
    def weight(self) -> torch.Tensor:
        """In fp32: the stored one, or a copy."""
        return self.stored.float()

    @property
    def gradient(self) -> torch.Tensor:
        """In fp32: the given one, or a copy."""
        return self.given.float()

    def pieces(self) -> Iterator[Shard]:
        """The shard in flat pieces, so that what an update computes of each element takes little memory; `step` is in each."""
        size = self.stored.numel()
        for start in range(0, size, PIECE_ELEMENTS):
            share = min(PIECE_ELEMENTS, size - start)

            def cut(tensor: torch.Tensor) -> torch.Tensor:
                """Its part of this piece; scales have fewer elements."""
                if not tensor.ndim:
                    return tensor
                return tensor.view(-1).narrow(0, start * tensor.numel() // size, share * tensor.numel() // size)  # noqa: B023

            state = {name: cut(tensor) for name, tensor in self.state.items()}
            yield replace(self, stored=cut(self.stored), given=cut(self.given), state=state, start=start)

    def put(self, skip: torch.Tensor, weight: torch.Tensor, **state: torch.Tensor) -> None:
        """Write the update, unless `skip` says not to; the host does not wait to know."""
        written = [(self.state[name], new) for name, new in state.items()]
        if self.rounding is None:
            written.append((self.stored, weight))
        else:
            parts = zip(*(tensor.view(-1).split(PIECE_ELEMENTS) for tensor in (self.stored, weight)), strict=True)
            starts = itertools.count(self.start, PIECE_ELEMENTS)
            written += [(old, self.rounding.round(new, start)) for start, (old, new) in zip(starts, parts, strict=False)]
        for old, new in written:
            old.copy_(torch.where(skip, old, new))


Sum = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Adds up tensors over the ranks that hold the shards of a weight, in one all-reduce. Collective."""
Update = Callable[[list[Shard], torch.Tensor, Sum], None]
"""Updates all shards; the second argument is whether to skip, a bool scalar on the device."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Takes `update` over the shards of all groups. Every rank has the same parameters with a gradient, in the same order."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, layout: Callable[[Shape], Layout], update: Update) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.layout, self.update = layout, update
        self.found_inf: torch.Tensor | None = None
        """1.0 to skip the next steps, else 0.0; a scalar on the device."""
        self.number = 0
        """Of the next step in the run, for `rounding_key`."""
        self.rounding_key: Callable[[Any, int], int] | None = None
        """With weights in bf16: the key of a weight in a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; where `found_inf` is 1, it changes no weight and no state, but makes the state. Collective."""
        with_gradient = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not with_gradient:
            return
        shards = []
        for group, p in with_gradient:
            if not self.state[p]:
                self.state[p] = {name: _zeros(p, part) for name, part in self.layout(tuple(p.shape)).items()}
            state = {name: _local(t) for name, t in self.state[p].items()}
            tensors = _local(p), _local(p.grad), state
            shards.append(Shard(*tensors, tuple(p.shape), group["lr"], group["weight_decay"], self._rounding(p)))
        first = with_gradient[0][1]
        skip = torch.zeros((), device=first.device) if self.found_inf is None else self.found_inf.to(first.device)
        self.update(shards, skip.view(()) > 0, partial(_add_up, shard_groups(first)))  # all are sharded alike

    def _rounding(self, weight: torch.Tensor) -> Rounding | None:
        if weight.dtype == torch.float32:
            return None
        assert weight.dtype == torch.bfloat16 and self.rounding_key is not None
        shape, held, offset = weight.shape, weight.shape, (0,) * weight.ndim
        if isinstance(weight, DTensor):
            held, offset = private("compute_local_shape_and_global_offset")(shape, weight.device_mesh, weight.placements)
        dim = next((dim for dim in range(len(shape)) if held[dim] < shape[dim]), 0)
        rows = math.prod(shape[dim + 1 :])
        first = offset[dim] * rows if shape else 0
        blocks = (held[dim] * rows, shape[dim] * rows) if dim else (0, 0)
        return Rounding(self.rounding_key(weight, self.number), first, *blocks)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Copy the state of each weight: torch's would cast it to the weight's dtype. Hyperparameters stay the config's."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, parameters, strict=True):
            for name, saved in state_dict["state"].get(key, {}).items():
                if name not in self.state[p]:
                    self.state[p][name] = _zeros(p, self.layout(tuple(p.shape))[name])
                self.state[p][name].copy_(saved)


def _zeros(weight: torch.Tensor, part: Part) -> torch.Tensor:
    """A tensor of state, sharded like its weight if it has the dimension along which that is cut."""
    dtype, num_shared = getattr(torch, part.dtype), len(part.shape) if part.num_shared is None else part.num_shared
    if not isinstance(weight, DTensor) or any(isinstance(p, Cut) and p.dim >= num_shared for p in weight.placements):
        return torch.zeros(part.shape, dtype=dtype, device=weight.device)
    whole: torch.Tensor = zeros(part.shape, dtype=dtype, device_mesh=weight.device_mesh, placements=weight.placements)
    return whole.to(weight.device)  # the mesh has another device than an offloaded shard, which lies on the host


def _local(tensor: torch.Tensor) -> Any:
    return private("_local_tensor", tensor) if isinstance(tensor, DTensor) else tensor


def shard_groups(weight: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks that share `weight`, or its gradient; none if it is a plain tensor. Replicas hold equal shards."""
    placed = list(enumerate(weight.placements)) if isinstance(weight, DTensor) else []
    return [weight.device_mesh.get_group(dim) for dim, placement in placed if isinstance(placement, Cut)]  # type: ignore[attr-defined]


def _add_up(groups: list[dist.ProcessGroup], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """A `Sum` over the ranks of these groups."""
    if not groups or not parts:
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    for group in groups:
        dist.all_reduce(flat, group=group)
    return [s.view(part.shape) for s, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)]


def random_bits(positions: torch.Tensor, key: int) -> torch.Tensor:
    """16 bits for each position (int64), as int32."""
    hashed = positions.to(torch.int32).bitwise_xor_(_signed(key))
    for shift, factor in ROUNDS:
        hashed ^= (hashed >> shift) & ((1 << (32 - shift)) - 1)  # int32 shifts its sign in
        hashed *= _signed(factor)
    return (hashed >> 16).bitwise_and_(0xFFFF)


def _signed(number: int) -> int:
    """The int32 with the number's lowest 32 bits."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
