"""Applies the limit on a row's tokens: plain text is split into rows that together hold every token; all other rows are cut, and
a sentence reports the share of lost tokens. Others report text that the tokenizer does not know, or does not give back.

In all of them `name` is `train` or `evaluation`, and `limit` the setting with its value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.tokens.special_tokens import compile_special_tokens, learn_spaces, put_spaces
from toolkit.data.tokens.tokenizer import MAX_TRAINING_CHARACTERS
from toolkit.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_IDS_OF_A_PIECE = 10**10
"""The k-th further piece of a text has the text's row id plus k times this: row 17, then 10000000017, 20000000017."""

_MOST_TOKENS_LOST = 0.05
_MAX_ROWS_DECODED = 100
_WHITE = {"line breaks": "\n", "tabs": "\t", "runs of spaces": "  "}
SIDES = {"train": "training", "evaluation": "evaluation"}
"""The name of each split in messages."""


def split_text(
    input_ids: np.ndarray, num_prefix: int, max_length_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
    """Split a text into pieces of at most `max_length_tokens`; each token except the first is a label in exactly one piece.
    Yields a piece's token ids, its labels, and from where up to where, exclusive, it adds the text's tokens.

    `input_ids` begin with the tokenizer's prefix of `num_prefix` tokens, at least two less than a piece. Each further piece
    begins with it too, and with the last token of the previous piece, which predicts the first new token. These do not count
    again.
    """
    begin, end = 0, min(max_length_tokens, len(input_ids))
    while begin < len(input_ids):
        row = np.concatenate([input_ids[:num_prefix], input_ids[begin - 1 : end]]) if begin else input_ids[:end]
        labels = row.copy()
        labels[: num_prefix + 1 if begin else 1] = IGNORED_LABEL
        yield row, labels, begin, end
        begin, end = end, min(end + max_length_tokens - num_prefix - 1, len(input_ids))


def describe_split(piece: np.ndarray, name: str, limit: str) -> list[str]:
    """One sentence if texts were split, else none; `piece` is the 0-based number of each row in its text."""
    num_texts, num_further = int((piece == 1).sum()), int((piece > 0).sum())
    if not num_texts:
        return []
    return [
        f"split {num_texts} of {(piece == 0).sum()} {SIDES[name]} rows, plain text longer than {limit}, into "
        f"{num_texts + num_further:,} rows that hold every token"
    ]


def describe_cut(num_given: np.ndarray, num_lost: np.ndarray, num_rows: int, name: str, limit: str, what: str = "") -> list[str]:
    """One sentence if rows were cut, with the share of the split's tokens that is lost, else none. A large share is a WARNING.

    Args:
        num_given: tokens of each row before the cut.
        num_lost: tokens of each row that the cut removes.
        num_rows: rows of the split; the pieces of a text count as one.
        what: the part of the row that is cut, if not the entire row.
    """
    num_cut, side = int((num_lost > 0).sum()), SIDES[name]
    if not num_cut:
        return []
    share, percent = _measure(num_lost, num_given)
    of_what = f"the {what} of " if what else ""
    tokens = f"{side} {what or 'row'} tokens"
    sentence = f"cut {of_what}{num_cut} of {num_rows} {side} rows to {limit}: {percent} % of all {tokens} lost"
    if share <= _MOST_TOKENS_LOST:
        return [sentence]
    longest = f"the longest {what or 'row'} has {num_given.max():,} tokens"
    return [f"WARNING: {sentence}; raise {limit.partition(' ')[0]} ({longest}), or split these rows"]


def describe_unknown(num_tokens: np.ndarray, num_unknown: np.ndarray, name: str, what: str) -> list[str]:
    """One sentence if tokens of rows stand for text that the tokenizer has no token for, else none. A large share is a WARNING.

    Tokens are counted by row; `what` is `source` or `target`.
    """
    if not num_unknown.any():
        return []
    share, percent = _measure(num_unknown, num_tokens)
    sentence = (
        f"{percent} % of all {SIDES[name]} {what} tokens, in {(num_unknown > 0).sum()} of {len(num_unknown)} rows, "
        "are unknown to the tokenizer: the model neither reads nor writes them"
    )
    return [f"WARNING: {sentence}" if share > _MOST_TOKENS_LOST else sentence]


def describe_lost_text(tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[str]], what: str = "rows") -> list[str]:
    """Sentences if decoding the tokens of texts does not return the texts, else none.

    T5's tokenizers lose line breaks and runs of spaces, BERT's also lose case, others lose unknown characters. A space before the
    first word does not count, because many tokenizers add or drop it. `rows` are the texts of each row, `what` their name.
    """
    sentences, lost = [], []
    tried = rows[:_MAX_ROWS_DECODED] if what != "sources" else []
    every = [text for texts in tried for text in texts]
    kept = learn_spaces(tokenizer, {token for text in every for token in compile_special_tokens(tokenizer).findall(text)}, every)
    for kind, white in _WHITE.items():
        ids = tokenizer(f"a{white}a", add_special_tokens=False)["input_ids"]
        num = 0 if white in str(tokenizer.decode(ids)) else sum(any(white in text.strip() for text in texts) for texts in rows)
        if num:
            level, share = "" if what == "sources" else "WARNING: ", f"{num} of {len(rows)} training {what} looked at"
            trouble = f"loses {kind}, which stand in {share} ({100 * num / len(rows):.1f} %)"
            remedy = f"with pretrained weights, model.add_tokens {json.dumps([white])} keeps them"
            remedy = remedy if white.strip(" ") else "no setting keeps them; tokenizers of bytes do, as ByT5's"
            sentences.append(f"{level}the tokenizer {tokenizer.name_or_path} {trouble}: {remedy}")
    for texts in tried:
        context = [text[:MAX_TRAINING_CHARACTERS] for text in texts]
        for text, ids in zip(context, tokenizer(context, add_special_tokens=False)["input_ids"], strict=True):
            decoded = put_spaces(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), kept)
            pair = (text.split(), decoded.split()) if sentences else (text.lstrip(" "), decoded.lstrip(" "))
            is_counted = what == "targets" and tokenizer.unk_token_id in ids  # by `describe_unknown`
            if pair[0] != pair[1] and not is_counted:
                lost.append(f"{text!r:.60} as {decoded!r:.60}")
                break
    trouble = f"{tokenizer.name_or_path} does not give back {len(lost)} of the first {len(tried)} training {what} as they are"
    return sentences + ([f"the tokenizer {trouble} ({lost[0]}): what it drops is never learned"] if lost else [])


def _measure(part: np.ndarray, whole: np.ndarray) -> tuple[float, str]:
    """The share of one count of tokens in another, as a number and as percent to print."""
    share = part.sum() / whole.sum()
    return share, f"{100 * share:.1f}" if share >= 0.001 else "less than 0.1"
