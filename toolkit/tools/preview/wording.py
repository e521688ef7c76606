"""What both views say: numbers and facts in words, hostile characters made visible, long texts shortened."""

from __future__ import annotations

import itertools

from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, RowView, Side, Span
from toolkit.tools.preview.step import StepView
from toolkit.tools.report.rows import percent

NAMES = {LOSS: "counts in the loss", CONTEXT: "context", PADDING: "padding", LOST: "cut off"}
MOST_CHARACTERS, MOST_TOKENS = 1200, 240
"""How much of a long text is shown: two thirds from its start, one third from its end."""
TOKENS_AT_A_CUT = 40
"""How many tokens before and after a cut are shown too."""


def shorten_text(text: str, row_id: int, *, is_whole: bool) -> list[str]:
    """The text; or its start, a remark on what is not shown, and its end."""
    num = len(text) - MOST_CHARACTERS
    if is_whole or num <= 0:
        return [text]
    head = 2 * MOST_CHARACTERS // 3
    return [text[:head], f"… {num:,} characters are not shown: --row {row_id} shows all …", text[num + head :]]


def shorten_spans(spans: list[Span], row_id: int, *, is_whole: bool) -> list[list[Span] | str]:
    """The tokens; or their start, those around cuts and their end, and remarks on what is not shown between them."""
    ends = [0, *itertools.accumulate(len(span.tokens) for span in spans)]
    total, head = ends[-1], 2 * MOST_TOKENS // 3
    if is_whole or total <= MOST_TOKENS:
        return [spans]
    cuts = [begin for span, begin in zip(spans, ends, strict=False) if span.kind == LOST]
    around = [(cut - TOKENS_AT_A_CUT, cut + TOKENS_AT_A_CUT) for cut in cuts]
    pieces: list[list[Span] | str] = []
    place = 0
    for first, last in [(0, head), *around, (total - MOST_TOKENS + head, total)]:
        if first > place:
            pieces.append(f"… {first - place:,} tokens are not shown: --row {row_id} shows all …")
        if last > place:
            pieces.append(_take(spans, max(first, place), last))
        place = max(place, last)
    return pieces


def _take(spans: list[Span], first: int, last: int) -> list[Span]:
    taken, place = [], 0
    for kind, tokens in spans:
        some = tokens[max(first - place, 0) : max(last - place, 0)]
        taken += [Span(kind, some)] if some else []
        place += len(tokens)
    return taken


def plural(num: int, what: str) -> str:
    """1 row, 2 rows, 1,000 micro-batches."""
    return f"{num:,} {what}{'' if num == 1 else 'es' if what.endswith(('ch', 's')) else 's'}"


def describe_turns(row: RowView) -> list[str]:
    """A line for each turn of a chat."""
    return [
        f"turn {number}, {turn.role}: {plural(turn.num_characters, 'character')}, {turn.says}"
        for number, turn in enumerate(row.turns, start=1)
    ]


def not_shown(step: StepView) -> str:
    """How many packs are not drawn; empty: none."""
    more = step.num_packs - len(step.first_packs)
    return f"{plural(more, 'more pack')} {'is' if more == 1 else 'are'} not drawn" if more else ""


def describe_step(step: StepView) -> list[str]:
    """What the first step is, in lines."""
    total = sum(step.positions.values())
    shares = ", ".join(f"{percent(num, total)} {NAMES[kind].replace('counts', 'count')}" for kind, num in step.positions.items())
    rows = f"{plural(step.num_tensor_rows, 'row')} of the tensors"
    if any(len(pack.row_ids) > 1 for pack in step.first_packs):
        rows = f"{plural(step.num_packs, 'pack')} in {rows}"
    return [
        f"{plural(len(step.rows), 'row')}; the loss is divided by N = {plural(step.num_label_tokens, 'label token')}",
        f"{plural(step.num_micro_batches, 'micro-batch')} on each of {plural(step.num_processes, 'process')}, {rows}; of "
        f"{total:,} positions {shares}",
    ]


def describe_row(row: RowView, step: StepView | None) -> list[str]:
    """What a row is, in lines; the first one is its heading."""
    lines = [
        f"Row {row.row_id} ({row.where}), {row.split}: {plural(row.num_tokens, 'token')}, {row.num_label_tokens:,} count "
        f"in the loss ({percent(row.num_label_tokens, row.num_tokens)})"
    ]
    if row.piece:
        lines.append(f"piece {row.piece[0]:,} of {row.piece[1]:,} of a long text; the pieces hold every token")
    if step is not None and (pack := step.packs_of_rows.get(row.row_id)):
        others = [str(other) for other in pack.row_ids if other != row.row_id]
        beside = f", in one pack with {'row' if len(others) == 1 else 'rows'} {', '.join(others)}" if others else ""
        lines.append(f"in step 1: process {pack.rank}, micro-batch {pack.micro_batch + 1}{beside}")
    return lines


def describe_side(side: Side) -> str:
    """How long a side is, and what the limit has cut off."""
    if not side.num_lost:
        return f"{plural(side.num_tokens, 'token')}, at most {side.limit:,}"
    given = side.num_tokens + side.num_lost
    return f"cut to {side.num_tokens:,} of {given:,} tokens, {side.num_lost:,} lost ({percent(side.num_lost, given)})"


def padding_behind(row: RowView, step: StepView | None, side: Side) -> int:
    """Padding that follows a row in its pack."""
    pack = step.packs_of_rows.get(row.row_id) if step else None
    return pack.padding[side.name] if pack and pack.row_ids[-1] == row.row_id else 0
