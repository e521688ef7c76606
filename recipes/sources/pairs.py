"""Pairs of lines about a function, a right one and one with a mistake: what `functions.py` says of it, and the same with a part
of what it says of another function.

A run reads it with `data.source: recipes/sources/pairs.py:load_rows`, in the columns `prompt`, `chosen` and `rejected`.

    def nametofont(name, root):
        return Font(name=name, exists=True, root=root)

    chosen: Takes name and root, returns Font(name=name, exists=True, root=root).
    rejected: Takes name and root, raises KeyError.
"""

from __future__ import annotations

import re

from functions import identify as identify  # the file beside this one
from functions import read_functions

_PARTS = re.compile(r"(Takes .*?)(, (?:returns|raises) .*)")


def load_rows(config: object) -> list[dict[str, str]]:
    """The rows of a run, for its `data.source`."""
    return build_pairs(read_functions())


def build_pairs(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A pair for each function, with the end of the next one's line of the same split, or its beginning; a mistake that changes
    nothing is left out."""
    pairs = []
    for split in ("train", "eval"):
        of_split = [row for row in rows if row["split"] == split]
        for place, (row, other) in enumerate(zip(of_split, [*of_split[1:], *of_split[:1]], strict=True)):
            right, wrong = (_PARTS.fullmatch(each["target"]) for each in (row, other))
            if right is None or wrong is None:
                continue
            rejected = right[1] + wrong[2] if place % 2 else wrong[1] + right[2]
            if rejected != row["target"]:
                kept = {name: row[name] for name in ("prompt", "lead_text", "group", "split")}
                pairs.append(kept | {"chosen": row["target"], "rejected": rejected})
    return pairs
