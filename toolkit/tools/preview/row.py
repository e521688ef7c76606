"""One row as the model will see it: its text, its tokens and what each is for, its turns, what a limit has cut off."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.config.schema import ModelConfig
from toolkit.data.rows.example import Example, read_examples
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens import causal
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE, SIDES
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.errors import UserError, plural
from toolkit.loss import IGNORED_LABEL
from toolkit.objectives.objective import Objective
from toolkit.tools.preview.step import CONTEXT, LOSS, LOST, PADDING, StepView, name_rows
from toolkit.tools.report.sections import Heading, Lines, percent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS, MOST_TOKENS, TOKENS_AT_A_CUT = 1200, 240, 40
"""How much of a long text is shown: two thirds from its start, one third from its end; and tokens before and after a cut."""
TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""
_NO_LIMIT, _MOST_TOKENS_OF_A_CHARACTER = 2**31, 16

Token = tuple[str, str]
"""What a token is for: `LOSS`, `CONTEXT` or `LOST`. And its text, see `token_texts`."""


class Tokens(NamedTuple):
    """Tokens of a row, each with what it is for."""

    tokens: list[Token]

    def by_kind(self) -> Iterator[tuple[str, list[str]]]:
        """Neighbours of one kind, and their texts."""
        for kind, group in itertools.groupby(self.tokens, key=lambda token: token[0]):
            yield kind, [text for _, text in group]

    def blocks(self) -> Iterator[Iterator[tuple[str, list[str]]]]:
        """At most `TOKENS_OF_A_BLOCK` at once, by kind."""
        for first in range(0, len(self.tokens), TOKENS_OF_A_BLOCK):
            yield Tokens(self.tokens[first : first + TOKENS_OF_A_BLOCK]).by_kind()


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a row is made of: one side, `row`, for a causal model; `source` and `target` for an encoder-decoder."""

    name: str
    text: str
    """Before the cut; of a chat, as its template renders it."""
    tokens: list[Token]
    """Also those that were cut off."""
    num_tokens: int
    num_lost: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class RowView:
    """One row."""

    row_id: int
    where: str
    """Its file and row number."""
    split: str
    sides: list[Side]
    num_tokens: int
    num_label_tokens: int
    turns: list[str]
    """The role, length and use of each message of a chat."""
    piece: tuple[int, int] | None
    """(number from 1, how many) of a long text that was split into several rows; the text is that of the piece."""


def find_cut_row(
    objective: Objective, rows: TokenizedRows, config: Any, model: ModelConfig, most_tried: int = 20
) -> RowView | None:
    """The first training row that a limit has cut; None if none of the first few that are as long as a limit has lost a token."""
    limits = [getattr(config, name) for name in objective.limits.values()]
    lengths = objective.side_lengths(rows.train).values()
    is_full = np.any([values >= limit for values, limit in zip(lengths, limits, strict=True)], axis=0)
    row_ids = rows.train.with_format("numpy")["row_id"][:][is_full][:most_tried]
    views = (view_row(objective, rows, config, model, int(row_id)) for row_id in row_ids)
    return next((view for view in views if any(side.num_lost for side in view.sides)), None)


def view_row(objective: Objective, rows: TokenizedRows, config: Any, model: ModelConfig, row_id: int) -> RowView:
    """The row with this id. For the process that has read the rows.

    Its tokens come from the token cache. To find what was cut off, its text is tokenized once more, by the same function without
    a limit. An id that no row has, or whose row was left out, is a `UserError`."""
    assert rows.texts is not None, "each node's first process has them"
    origins, text_id = rows.texts.origins, row_id % ROW_IDS_OF_A_PIECE
    found, given = _find(rows, row_id), _find(rows.texts, text_id)
    num_rows = sum(num for _, num in origins)
    if found is None and not 0 <= row_id < num_rows:
        raise UserError(f"--row is {row_id}: give an id from 0 to {num_rows - 1}")
    where = causal.locate(text_id, origins)
    if found is None or given is None:
        raise UserError(f"--row is {row_id}, {where}, which is left out: the remarks above say why")
    name, row = found[0], {column: values[0] for column, values in found[1].items()}
    (example,) = read_examples(given[1])
    num_pieces = int((getattr(rows, name).with_format("numpy")["row_id"][:] % ROW_IDS_OF_A_PIECE == text_id).sum())
    turns: list[str] = []
    if example.text is not None:  # a text loses nothing; each of its rows has its own part of it
        full = row
        texts = {"row": example.text if num_pieces == 1 else str(rows.tokenizer.decode(row["input_ids"]))}
    else:
        unlimited = replace(config, **dict.fromkeys(objective.limits.values(), _NO_LIMIT))
        objective.set_up(rows.tokenizer, unlimited, model)
        columns = objective.tokenize(given[1], rows.tokenizer, unlimited, origins)
        full = {column: values[0] for column, values in columns.items()}
        texts = objective.show_texts(example, rows.tokenizer, config, where)
        if example.messages is not None:
            first, kept = (objective.documents(columns)[0] for columns in (full, row))
            turns = _list_turns(example, config.loss_on, first["labels"], len(kept["input_ids"]))
    return RowView(
        row_id=row_id,
        where=where,
        split=SIDES[name],
        sides=[_build_side(objective, rows.tokenizer, side, text, row, full, config) for side, text in texts.items()],
        num_tokens=row["num_tokens"],
        num_label_tokens=sum(label != IGNORED_LABEL for label in row["labels"]),
        turns=turns,
        piece=(row_id // ROW_IDS_OF_A_PIECE + 1, num_pieces) if num_pieces > 1 else None,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token. Where several tokens spell one character, the first has it and the others are empty.

    A token that stands for a space at the start of a text keeps it, which decoding would drop.
    """
    special, names = set(tokenizer.all_special_ids), tokenizer.convert_ids_to_tokens(list(ids))
    decode = functools.cache(lambda some: str(tokenizer.decode(some, clean_up_tokenization_spaces=False)))
    texts: list[str] = []
    while (place := len(texts)) < len(ids):
        name = str(names[place])
        if ids[place] in special:
            texts.append(name)
        elif "▁" in name:
            texts.append(name.replace("▁", " "))
        else:
            for num in range(1, _MOST_TOKENS_OF_A_CHARACTER + 1):
                text = decode(tuple(ids[place : place + num]))
                if "\ufffd" not in text or place + num >= len(ids):
                    break
            texts += [text, *[""] * (num - 1)] if "\ufffd" not in text else [name]
    return texts


def _find(splits: TokenizedRows | TextRows, row_id: int) -> tuple[str, dict[str, list[Any]]] | None:
    """The split of a row, and its columns, as a batch of one row; None if it was left out."""
    for name in SIDES:
        part = getattr(splits, name)
        if len(found := np.flatnonzero(part.with_format("numpy")["row_id"][:] == row_id)):
            return name, part[int(found[0]) : int(found[0]) + 1]
    return None


def _build_side(
    objective: Objective, tokenizer: Any, name: str, text: str, row: dict[str, Any], full: dict[str, Any], config: Any
) -> Side:
    """Compare the tokens that are kept, in `row`, with those without a limit, in `full`: what the kept ones leave out of a
    document is lost."""
    column = "labels" if name == objective.label_side else "input_ids"
    tokens, num_kept, num_all = list[Token](), 0, 0
    documents = [*zip(objective.documents(row), objective.documents(full), strict=True)]
    documents = documents[:1] if objective.label_side not in ("", name) else documents  # a source is there once
    for kept, given in documents:
        ids = [int(token) for token in given[column]]
        counts = [label != IGNORED_LABEL for label in given["labels"]]
        if objective.label_side:
            counts = [name == objective.label_side] * len(ids)
        # The end token is put back after a cut source or target.
        both = enumerate(zip(kept[column], ids, strict=False))
        start = next((i for i, (ours, other) in both if ours != other), len(kept[column]))
        num_lost = len(ids) - len(kept[column])
        kinds = [
            LOST if start <= place < start + num_lost else LOSS if does_count else CONTEXT
            for place, does_count in enumerate(counts)
        ]
        tokens += zip(kinds, token_texts(tokenizer, ids), strict=True)
        num_kept, num_all = num_kept + len(kept[column]), num_all + len(ids)
    limit = len(documents) * getattr(config, objective.limits[name])
    return Side(name=name, text=text, tokens=tokens, num_tokens=num_kept, num_lost=num_all - num_kept, limit=limit)


def _list_turns(example: Example, loss_on: str, labels: Sequence[int], num_kept: int) -> list[str]:
    """The messages of a chat, from its labels without a limit, of which `num_kept` tokens are within it."""
    # The labels of each turn that is trained on are neighbours.
    counted = np.flatnonzero(np.asarray(labels) != IGNORED_LABEL)
    runs = np.split(counted, np.flatnonzero(np.diff(counted) > 1) + 1)
    trained = example.trained_turns
    of_turn = dict(zip(trained, runs, strict=True)) if len(runs) == len(trained) and loss_on == "completions" else {}
    turns = []
    for i, message in enumerate(example.messages or []):
        says = "context"
        if loss_on == "all":
            says = "counts, as data.loss_on is all"
        elif i in of_turn:
            num, num_left = len(of_turn[i]), int((of_turn[i] < num_kept).sum())
            says = f"{num} tokens count" if num_left == num else f"{num_left} of {num} tokens count, the others are cut off"
        elif i in trained:
            says = "counts"
        elif message["role"] == "assistant":
            says = "context, as its weight is 0" if i in example.weight_0 else "context, as a part of the prompt"
        turns.append(f"{message['role']}: {plural(len(message.get('content') or ''), 'character')}, {says}")
    return turns


def describe_row(row: RowView, step: StepView | None, *, is_whole: bool) -> Iterator[Any]:
    """The row in words and tokens, and where it is in the step; shortened unless `is_whole`."""
    yield Heading(
        f"Row {row.row_id} ({row.where}), {row.split}: {plural(row.num_tokens, 'token')}, {row.num_label_tokens:,} count "
        f"in the loss ({percent(row.num_label_tokens, row.num_tokens)})"
    )
    lines = []
    if row.piece:
        lines.append(f"piece {row.piece[0]:,} of {row.piece[1]:,} of a long text; the pieces hold every token")
    pack = step.find_pack(row.row_id) if step else None
    if pack:
        others = [other for other in pack.row_ids if other != row.row_id]
        beside = f", in one pack with {name_rows(others)}" if others else ""
        lines.append(f"in step 1: process {pack.rank}, micro-batch {pack.micro_batch + 1}{beside}")
    lines += [f"turn {number}, {turn}" for number, turn in enumerate(row.turns, start=1)]
    yield Lines(lines, "quiet")
    for side in row.sides:
        given, lost = side.num_tokens + side.num_lost, side.num_lost
        length = f"cut to {side.num_tokens:,} of {given:,} tokens, {lost:,} lost ({percent(lost, given)})"
        length = length if lost else f"{plural(given, 'token')}, at most {side.limit:,}"
        yield Heading(f"{side.name.capitalize()}: {length}", 4)
        if is_whole or (num_hidden := len(side.text) - MOST_CHARACTERS) <= 0:
            yield Lines([side.text], "text")
        else:
            head = 2 * MOST_CHARACTERS // 3
            yield Lines([side.text[:head]], "text")
            yield Lines([f"… {num_hidden:,} characters are not shown: --row {row.row_id} shows all …"], "quiet")
            yield Lines([side.text[num_hidden + head :]], "text")
        yield Lines(["as tokens"], "quiet")
        pieces = shorten_tokens(side.tokens, row.row_id, is_whole=is_whole)
        yield from (Lines([piece], "quiet") if isinstance(piece, str) else Tokens(piece) for piece in pieces)
        if pack and pack.row_ids[-1] == row.row_id and (padding := pack.padding[side.name]):
            yield Lines([f"{plural(padding, 'token')} of padding"], PADDING)


def shorten_tokens(tokens: list[Token], row_id: int, *, is_whole: bool) -> list[list[Token] | str]:
    """The tokens; or their start, those around cuts and their end, and remarks on what is not shown between them."""
    if is_whole or len(tokens) <= MOST_TOKENS:
        return [tokens]
    head, is_shown = 2 * MOST_TOKENS // 3, np.zeros(len(tokens), dtype=bool)
    is_shown[:head] = is_shown[head - MOST_TOKENS :] = True
    is_lost = np.array([kind == LOST for kind, _ in tokens])
    for cut in np.flatnonzero(np.diff(is_lost, prepend=False) & is_lost):
        is_shown[max(0, cut - TOKENS_AT_A_CUT) : cut + TOKENS_AT_A_CUT] = True
    pieces: list[list[Token] | str] = []
    for shown, group in itertools.groupby(zip(is_shown, tokens, strict=True), key=lambda pair: bool(pair[0])):
        some = [token for _, token in group]
        pieces.append(some if shown else f"… {len(some):,} tokens are not shown: --row {row_id} shows all …")
    return pieces
