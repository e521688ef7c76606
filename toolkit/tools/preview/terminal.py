"""The view in the terminal, by `rich`: coloured there; plain where it is piped, with marks in the colours' place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import starmap
from typing import Any

from rich.console import Console
from rich.text import Text

from toolkit.errors import align, visible
from toolkit.tools.preview.row import Tokens
from toolkit.tools.preview.step import CONTEXT, LOSS, LOST, NAMES, PADDING, Bar, Legend
from toolkit.tools.report.sections import Heading, Histogram, Lines, Table

STYLES = {LOSS: "bold green", CONTEXT: "", PADDING: "dim", LOST: "strike red"}
MARKS = {LOSS: ("[[", "]]"), CONTEXT: ("", ""), PADDING: ("", ""), LOST: ("~~", "~~")}
"""Around tokens where there is no colour."""
BARS = {LOSS: "█", CONTEXT: "▒", PADDING: "·"}
BAR_WIDTH = 60


def print_parts(parts: Iterable[Any], console: Console) -> None:
    """Print the parts of the view. Their lines are `Text`, in which rich interprets nothing."""
    for part in parts:
        for line in lines_of(part, console):
            console.print(line, soft_wrap=True)


def lines_of(part: Any, console: Console) -> Iterator[Text]:
    """The lines of a part; in a terminal wrapped to its width, elsewhere never."""

    def marked(kind: str, text: str) -> Text:
        has_colour = console.is_terminal and not console.no_color and console.color_system is not None
        before, after = ("", "") if has_colour else MARKS[kind]
        return Text(f"{before}{text}{after}", style=STYLES[kind])

    def wrapped(text: Text, indent: int = 2) -> Iterator[Text]:
        width = max(20, console.width - indent)
        for line in text.split("\n", allow_blank=True):
            for piece in line.wrap(console, width, overflow="fold") if console.is_terminal else [line]:
                yield Text(" " * (indent if piece.plain else 0)).append_text(piece)

    match part:
        case Heading(text, level):
            yield from [Text()] * (level < 4)
            style = {1: "bold", 4: "bold"}.get(level, "bold cyan")
            yield from wrapped(Text(visible(text), style=style), indent=2 * (level == 4))
        case Lines(lines, kind):
            for line in lines:
                yield from wrapped(Text(visible(line)), indent=4 if kind == "text" else 2)
        case Table(rows, left):
            for number, line in enumerate(align([list(map(visible, row)) for row in rows], left)):
                yield Text(f"  {line}".rstrip(), style="" if number else "dim")
        case Histogram(bins):
            width, most = max(len(label) for label, _ in bins), max(count for _, count in bins)
            for label, count in bins:
                yield Text(f"  {label:>{width}}  {'█' * math.ceil(BAR_WIDTH * count / most)} {count:,}")
        case Legend(kinds, True):
            yield Text(f"  {', '.join(f'{BARS[kind]} {NAMES[kind]}' for kind in kinds)}")
        case Legend(kinds):
            names = [marked(kind, NAMES[kind]) for kind in kinds]
            yield from wrapped(Text("tokens, with | between two: ").append_text(Text(", ").join(names)))
        case Bar():
            yield _draw(part)
        case Tokens():
            shown = ((kind, "|".join(visible(text).replace("\n", "⏎\n") for text in texts)) for kind, texts in part.by_kind())
            yield from wrapped(Text().append("|", style="dim").join(starmap(marked, shown)), indent=4)


def _draw(bar: Bar) -> Text:
    """Parts are as wide as their share of the longest pack; `|` is between two rows."""
    line, done, drawn = Text("    "), 0, 0
    for place, (kind, num) in enumerate(bar.pack.parts):
        if place in bar.pack.begins[1:]:
            line.append("|", style="dim")
        done += num
        end = round(BAR_WIDTH * done / bar.longest)
        line.append(BARS[kind] * (end - drawn), style=STYLES[kind])
        drawn = end
    return line.append(f"  {bar.label}")
