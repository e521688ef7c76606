"""Packing: the rows of a step are combined into packs of bounded length, which leaves little padding."""

from __future__ import annotations

import bisect

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each row, longest first, goes into the fullest pack that still has room for it.

    Uses at most 11/9 of the minimum number of packs, plus one (Johnson, 1973). Depends only on the lengths.

    Args:
        lengths: tokens of each row, none above `capacity`.
        capacity: maximum tokens of a pack.

    Returns:
        Indices into `lengths`, by pack.
    """
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens free, pack), sorted
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        assert length <= capacity, "rows are cut to the capacity before"
        fullest = bisect.bisect_left(spaces, (length, -1))
        if fullest == len(spaces):
            packs.append([])
            space, pack = capacity, len(packs) - 1
        else:
            space, pack = spaces.pop(fullest)
        packs[pack].append(place)
        bisect.insort(spaces, (space - length, pack))
    return packs
