"""A run's rows in figures, as a preview and a report show them: from `preview.summary`, or from `record.json`, which keeps it.

A view is a list of parts, from top to bottom. Each part is HTML by itself; `preview.terminal` prints the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.tools.report.elements import bar, element, text_table

SIDE_NAMES = {
    "row": "Tokens of a training row",
    "counted": "Tokens of a training row that count in the loss",
    "source": "Tokens of a source",
    "target": "Tokens of a target",
}
_COUNTED = ("rows", "tokens", "count in the loss", "share")


class Heading(NamedTuple):
    """A heading; one of level 3 begins a card, one above it ends the card before."""

    text: str
    level: int = 3

    def html(self) -> str:
        return element(f"h{self.level}", self.text)


class Lines(NamedTuple):
    """Sentences, one per line."""

    lines: Sequence[str]
    kind: str = ""

    def html(self) -> str:
        return "".join(element("p", line, self.kind) for line in self.lines)


class Table(NamedTuple):
    """A table with a heading line; columns that are not `left` hold numbers."""

    rows: list[list[str]]
    left: Sequence[int] = (0,)

    def html(self) -> str:
        return text_table(self.rows, left=self.left)


class Histogram(NamedTuple):
    """(label, number of rows) of each bin."""

    bins: list[tuple[str, int]]

    def html(self) -> str:
        most = max(count for _, count in self.bins)
        return f"<div class=rank>{''.join(bar(label, count / most, f'{count:,}') for label, count in self.bins)}</div>\n"


def render(parts: Iterable[Any]) -> str:
    """The parts as HTML, in cards."""
    pieces, is_open = [], False
    for part in parts:
        if isinstance(part, Heading) and part.level <= 3:
            pieces.append("</div>\n" * is_open + "<div class=card>" * (part.level == 3))
            is_open = part.level == 3
        pieces.append(part.html())
    return "".join([*pieces, "</div>\n" * is_open])


def describe_data(data: Mapping[str, Any], *, has_remarks: bool = True) -> Iterator[Any]:
    """The parts of a summary.

    Args:
        has_remarks: with how files were read, and what was left out; a terminal has these lines already.
    """
    yield Heading("Rows")
    if has_remarks:
        yield Lines(data["readings"], "isolated")
        yield from (Lines([remark], "warn" if remark.startswith("WARNING") else "") for remark in data["remarks"])
    yield Table([["split", *_COUNTED], *([split["name"], *_counts(split)] for split in data["splits"])])
    if data["sources"]:
        cells = [[source["name"], f"{100 * source['weight_share']:.1f} %", *_counts(source)] for source in data["sources"]]
        yield Table([["source", "share of an epoch", *_COUNTED], *cells])
    yield Lines([f"duplicates: {'; '.join(data['duplicates']) or 'none'}"])
    yield Heading("Lengths")
    for lengths in data["lengths"]:
        limited = f" ({lengths['setting']})" if lengths["setting"] else ""
        yield Heading(f"{SIDE_NAMES[lengths['name']]}{limited}", 4)
        names = {"0": "shortest", "50": "median", "100": "longest"}
        yield Lines(
            [", ".join(f"{names.get(key, f'p{key}')} {value:,}" for key, value in lengths["percentiles"].items())], "quiet"
        )
        bins = [(f"{low:,}–{high:,}" if high > low else f"{low:,}", count) for low, high, count in lengths["bins"]]
        yield Histogram(bins)
    yield Heading("Tokenizer")
    cells = [[t["text"], str(t["token_id"]), f"{t['num_in_training']:,}", t["roles"]] for t in data["special_tokens"]]
    yield Table([["special token", "id", "in training rows", "role"], *cells], left=(0, 3))
    stops = f"; a generated text ends at {' or '.join(data['stop_tokens'])}" if data["stop_tokens"] else ""
    yield Lines([f"{data['tokenizer']}, {'with' if data['chat_template'] else 'without'} a chat template{stops}"], "quiet")


def percent(part: int, whole: int) -> str:
    """A share; of nothing, a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _counts(of: Mapping[str, Any]) -> list[str]:
    numbers = [of[name] for name in ("num_rows", "num_tokens", "num_label_tokens")]
    return [*(f"{number:,}" for number in numbers), percent(numbers[2], numbers[1])]
