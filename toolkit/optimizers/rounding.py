"""Stochastic rounding of fp32 values to bf16: up or down at random, so that the mean is the value, and small updates add up.

The bits of an element depend on a key and on its position in the full weight, so that ranks round alike however they cut it. They
are a hash, not a generator's, whose numbers depend on the kernel that draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDS = ((16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1))
"""Shifts and factors of a hash of 32 bits (github.com/skeeto/hash-prospector, two rounds of xorshift and multiply)."""


@dataclass(frozen=True)
class Rounding:
    """How this rank's shard of a weight is rounded in one step."""

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
