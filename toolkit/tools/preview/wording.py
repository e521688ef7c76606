"""What the terminal and the page both show: the parts of a view, facts in words, long texts shortened."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from toolkit.errors import plural
from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, RowView, Side, Token
from toolkit.tools.preview.step import Pack, StepView
from toolkit.tools.report.parts import Heading, Lines, describe_data, percent

NAMES = {LOSS: "counts in the loss", CONTEXT: "context", PADDING: "padding", LOST: "cut off"}
MOST_CHARACTERS, MOST_TOKENS = 1200, 240
"""How much of a long text is shown: two thirds from its start, one third from its end."""
TOKENS_AT_A_CUT = 40
"""How many tokens before and after a cut are shown too."""
MOST_PACKS = 24
"""Packs of the step that are drawn."""
TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What is shown."""

    title: str
    processes: str
    """How many processes the step is for, and why."""
    summary: dict[str, Any] | None
    """Of `summarize`. None, as `step`, for a single row, which is shown in full length."""
    step: StepView | None
    rows: list[RowView]


class Legend(NamedTuple):
    """The kinds of tokens, or of parts of bars."""

    kinds: Sequence[str]
    is_of_bars: bool = False


class Bar(NamedTuple):
    """A pack, as long as its share of the longest one that is shown."""

    pack: Pack
    longest: int
    label: str


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


def list_parts(preview: Preview, *, has_remarks: bool) -> Iterator[Any]:
    """The view from top to bottom; `has_remarks` as in `describe_data`."""
    yield Heading(preview.title, 1)
    yield Lines([preview.processes], "quiet")
    if preview.summary:
        yield from [Heading("Data", 2)] * has_remarks
        yield from describe_data(preview.summary, has_remarks=has_remarks)
    if preview.step:
        yield from _describe_step(preview.step)
    if preview.rows:
        yield Heading("Rows as the model will see them", 2)
        yield Legend((LOSS, CONTEXT, LOST))
    for row in preview.rows:
        yield from _describe_row(row, preview.step, is_whole=preview.step is None)


def _describe_step(step: StepView) -> Iterator[Any]:
    first, num_processes = step.plan.step(1), step.plan.world_size
    yield Heading(f"Step 1 of {step.num_steps:,} ({step.plan.steps_per_epoch:,} an epoch)")
    total = sum(step.positions.values())
    shares = ", ".join(f"{percent(num, total)} {NAMES[kind].replace('counts', 'count')}" for kind, num in step.positions.items())
    rows = f"{plural(step.num_tensor_rows, 'row')} of the tensors"
    drawn = step.packs[:MOST_PACKS]
    if any(len(pack.row_ids) > 1 for pack in step.packs):
        rows = f"{plural(len(step.packs), 'pack')} in {rows}"
    yield Lines(
        [
            f"{plural(len(first.rows), 'row')}; the loss is divided by N = {plural(first.num_label_tokens, 'label token')}",
            f"{plural(step.num_micro_batches, 'micro-batch')} on each of {plural(num_processes, 'process')}, {rows}; of "
            f"{total:,} positions {shares}",
        ]
    )
    yield Legend((LOSS, CONTEXT, PADDING), is_of_bars=True)
    longest = max(sum(num for _, num in pack.parts) for pack in drawn)
    for (rank, micro_batch), packs in itertools.groupby(drawn, key=lambda pack: (pack.rank, pack.micro_batch)):
        yield Heading(f"Process {rank}, micro-batch {micro_batch + 1}", 4)
        yield from (Bar(pack, longest, _name_rows(pack.row_ids)) for pack in packs)
    if more := len(step.packs) - len(drawn):
        yield Lines([f"{plural(more, 'more pack')} {'is' if more == 1 else 'are'} not drawn"], "quiet")


def _describe_row(row: RowView, step: StepView | None, *, is_whole: bool) -> Iterator[Any]:
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
        beside = f", in one pack with {_name_rows(others)}" if others else ""
        lines.append(f"in step 1: process {pack.rank}, micro-batch {pack.micro_batch + 1}{beside}")
    lines += [f"turn {number}, {turn}" for number, turn in enumerate(row.turns, start=1)]
    yield Lines(lines, "quiet")
    for side in row.sides:
        yield Heading(f"{side.name.capitalize()}: {_describe_length(side)}", 4)
        texts = shorten_text(side.text, row.row_id, is_whole=is_whole)
        yield from (Lines([text], "quiet" if number == 1 else "text") for number, text in enumerate(texts))
        yield Lines(["as tokens"], "quiet")
        pieces = shorten_tokens(side.tokens, row.row_id, is_whole=is_whole)
        yield from (Lines([piece], "quiet") if isinstance(piece, str) else Tokens(piece) for piece in pieces)
        if pack and pack.row_ids[-1] == row.row_id and (padding := pack.padding[side.name]):
            yield Lines([f"{plural(padding, 'token')} of padding"], PADDING)


def _describe_length(side: Side) -> str:
    """How long a side is, and what the limit has cut off."""
    if not side.num_lost:
        return f"{plural(side.num_tokens, 'token')}, at most {side.limit:,}"
    given = side.num_tokens + side.num_lost
    return f"cut to {side.num_tokens:,} of {given:,} tokens, {side.num_lost:,} lost ({percent(side.num_lost, given)})"


def _name_rows(row_ids: Sequence[int]) -> str:
    return f"{'row' if len(row_ids) == 1 else 'rows'} {', '.join(map(str, row_ids))}"


def shorten_text(text: str, row_id: int, *, is_whole: bool) -> list[str]:
    """The text; or its start, a remark on what is not shown, and its end."""
    num = len(text) - MOST_CHARACTERS
    if is_whole or num <= 0:
        return [text]
    head = 2 * MOST_CHARACTERS // 3
    return [text[:head], f"… {num:,} characters are not shown: --row {row_id} shows all …", text[num + head :]]


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
