"""What a limit on a row's tokens does: plain text is split into rows that together hold every token, everything else is cut, and
a sentence says what share of the tokens is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from toolkit.loss import IGNORED_LABEL

ROW_IDS_OF_A_PIECE = 10**10
"""The k-th further piece of a text has the row id of the text and k times this: row 17 goes on as 10000000017, 20000000017."""

_MOST_TOKENS_LOST = 0.05
SIDES = {"train": "training", "evaluation": "evaluation"}
"""Of the split, in messages."""


class Piece(NamedTuple):
    """A part of a text as a row."""

    input_ids: np.ndarray
    labels: np.ndarray
    begin: int
    """The tokens of the text from `begin` up to `end` are new in it."""
    end: int


def split_text(input_ids: np.ndarray, num_prefix: int, max_length_tokens: int) -> Iterator[Piece]:
    """Pieces of a text of at most `max_length_tokens`, in which each of its tokens but the first is a label exactly once.

    A further piece begins as the text does, with the tokens that stand before every text, and then has the last token of the
    piece before, which predicts its first new one. Neither counts again.

    Args:
        input_ids: of the whole text.
        num_prefix: the first so many stand before every text; at least two fewer than `max_length_tokens`.
    """
    begin, end = 0, min(max_length_tokens, len(input_ids))
    labels = input_ids[:end].copy()
    labels[:1] = IGNORED_LABEL
    yield Piece(input_ids[:end], labels, begin, end)
    while end < len(input_ids):
        begin, end = end, min(end + max_length_tokens - num_prefix - 1, len(input_ids))
        row = np.concatenate([input_ids[:num_prefix], input_ids[begin - 1 : end]])
        labels = row.copy()
        labels[: num_prefix + 1] = IGNORED_LABEL
        yield Piece(row, labels, begin, end)


def tell_split(piece: np.ndarray, name: str, limit: str) -> list[str]:
    """A sentence where texts were split.

    Args:
        piece: of each row, its number in its text, from 0.
        name: `train` or `evaluation`.
        limit: the setting and its value.
    """
    num_texts, num_further = int((piece == 1).sum()), int((piece > 0).sum())
    if not num_texts:
        return []
    side = SIDES[name]
    return [
        f"split {num_texts} of {(piece == 0).sum()} {side} rows, plain text longer than {limit}, into "
        f"{num_texts + num_further:,} rows that hold every token"
    ]


def tell_cut(num_given: np.ndarray, num_lost: np.ndarray, num_rows: int, name: str, limit: str, what: str = "") -> list[str]:
    """A sentence where rows were cut, with the share of all tokens on their side of the split that is lost, marked if large.

    Args:
        num_given: tokens of each row before the cut.
        num_lost: those of them that are lost to it.
        num_rows: in all, pieces of a text counted as one.
        name: `train` or `evaluation`.
        limit: the setting and its value.
        what: the part of the row that was cut, if not all of it.
    """
    num_cut, side = int((num_lost > 0).sum()), SIDES[name]
    if not num_cut:
        return []
    share = num_lost.sum() / num_given.sum()
    percent = f"{100 * share:.1f}" if share >= 0.001 else "less than 0.1"
    of_what = f"the {what} of " if what else ""
    sentence = (
        f"cut {of_what}{num_cut} of {num_rows} {side} rows to {limit}: {percent} % of all {side} {what or 'row'} tokens lost"
    )
    if share <= _MOST_TOKENS_LOST:
        return [sentence]
    longest = f"the longest {what or 'row'} has {num_given.max():,} tokens"
    return [f"WARNING: {sentence}; raise {limit.partition(' ')[0]} ({longest}), or split these rows"]
