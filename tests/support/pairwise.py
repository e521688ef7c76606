"""Cases in which each value of a factor meets each value of every other factor at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Case = dict[str, Any]


def cover_pairs(factors: dict[str, Sequence[Any]], exists: Callable[[Case], bool] = lambda _: True) -> list[Case]:
    """The cases, chosen one after another: each meets the most pairs that no one before it has met.

    Args:
        exists: whether a case is one; a pair that none has is left out.
    """
    every = [case for values in itertools.product(*factors.values()) if exists(case := dict(zip(factors, values, strict=True)))]
    pairs_of = [frozenset(itertools.combinations(case.items(), 2)) for case in every]
    left, chosen = set().union(*pairs_of), []
    while left:
        best = max(range(len(every)), key=lambda place: len(pairs_of[place] & left))
        chosen.append(every[best])
        left -= pairs_of[best]
    return chosen
