"""Pairs of lines about a function, a right one and one with a mistake: what `functions.py` says of it, and the same with a part
of what it says of another function.

A run reads it with `data.source: recipes/sources/pairs.py:load_rows`, in the columns `prompt`, `chosen` and `rejected`.

    def nametofont(name, root):
        return Font(name=name, exists=True, root=root)

    chosen: Takes name and root, returns Font(name=name, exists=True, root=root).
    rejected: Takes name and root, raises KeyError.

Or beside what a model wrote, where it is wrong (`make dpo`): `python recipes/sources/pairs.py FILE` writes rows to generate lines
for, and `data.source: recipes/sources/pairs.py:load_lines` with `data.files: [FILE, LINES]` reads both.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from functions import identify as identify  # the file beside this one
from functions import read_functions

NUM_TRAINING_ROWS = 4000  # lines for these take two cores a minute
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


def load_lines(config: Any) -> list[dict[str, str]]:
    """As `load_rows`, of the rows and the model's lines in the two files of `data.files`."""
    rows, lines = ([json.loads(line) for line in Path(file).read_bytes().splitlines()] for file in config.files)
    return pair_lines(rows, [line["prediction"] for line in lines])


def pair_lines(rows: list[dict[str, str]], lines: list[str]) -> list[dict[str, str]]:
    """A pair for each function whose line is wrong; in the evaluation split one for each, with a mistake of `build_pairs` where
    the line is right, so that texts are generated for all."""
    mistakes = {pair["prompt"]: pair for pair in build_pairs([row for row in rows if row["split"] == "eval"])}
    pairs = []
    for row, line in zip(rows, lines, strict=True):
        if line.strip() != row["target"].strip():
            kept = {name: row[name] for name in ("prompt", "lead_text", "group", "split")}
            pairs.append(kept | {"chosen": row["target"], "rejected": line})
        elif row["prompt"] in mistakes:
            pairs.append(mistakes[row["prompt"]])
    return pairs


def main() -> None:
    """Write the rows of `load_lines` into the file that the command names."""
    rows = read_functions()
    training = [row for row in rows if row["split"] == "train"][:NUM_TRAINING_ROWS]
    chosen = training + [row for row in rows if row["split"] == "eval"]
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


if __name__ == "__main__":
    main()
