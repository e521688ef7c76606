"""What an optimizer keeps of a weight, and its bytes. A rank holds whole rows of a weight, so state is cut by rows too."""

from __future__ import annotations

import math
from typing import NamedTuple

Shape = tuple[int, ...]

ITEM_BYTES = {"float32": 4, "uint8": 1}


class Part(NamedTuple):
    """One tensor of the state of a weight, unsharded."""

    shape: Shape
    dtype: str = "float32"
    is_cut: bool = True
    """Whether a rank holds only the rows (dimension 0) that it holds of the weight; otherwise each rank holds all of it."""

    def num_bytes(self, num_rows: int | None) -> int:
        """Bytes on a rank that holds `num_rows` of the weight; None: all."""
        rows = (num_rows,) if self.is_cut and self.shape and num_rows is not None else self.shape[:1]
        return ITEM_BYTES[self.dtype] * math.prod((*rows, *self.shape[1:]))


Layout = dict[str, Part]
"""By torch's names of state."""
