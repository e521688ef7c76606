"""What an optimizer keeps of a weight, and its bytes. A rank holds whole rows of a weight, or of each expert's: so it does of the
state."""

import math
from typing import NamedTuple

Shape = tuple[int, ...]

ITEM_BYTES = {"float32": 4, "uint8": 1}


class Part(NamedTuple):
    """One tensor of the state of a weight, unsharded."""

    shape: Shape
    dtype: str = "float32"
    num_shared: int | None = None
    """Leading dimensions that are the weight's; None: all. Cut along one of these, a rank holds its part; otherwise all of it."""

    def num_bytes(self, of_shard: Shape) -> int:
        """Bytes on a rank whose shard of the weight has the shape `of_shard`."""
        num_shared = len(self.shape) if self.num_shared is None else self.num_shared
        return ITEM_BYTES[self.dtype] * math.prod((*of_shard[:num_shared], *self.shape[num_shared:]))


Layout = dict[str, Part]
"""By torch's names of state."""
