"""The parts that only a preview has, and a view as one self-contained HTML page: no script, no request, light and dark.

Every text goes through `escaped`, which leaves nothing that HTML or a terminal would interpret.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, Token
from toolkit.tools.preview.step import Pack
from toolkit.tools.report.elements import begin_page, element, escaped
from toolkit.tools.report.rows import render

NAMES = {LOSS: "counts in the loss", CONTEXT: "context", PADDING: "padding", LOST: "cut off"}
TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


def render_page(title: str, parts: Iterable[Any]) -> str:
    """The page of these parts, and of those of `report.rows`."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = begin_page(title, style, "default-src 'none'; style-src 'unsafe-inline'")
    return f"{head}{render(parts)}</body>\n</html>\n"


class Legend(NamedTuple):
    """The kinds of tokens, or of parts of bars."""

    kinds: Sequence[str]
    is_of_bars: bool = False

    def html(self) -> str:
        keys = [f'<span class="key {kind}">{NAMES[kind]}</span>' for kind in self.kinds]
        return f"<p>{''.join(keys)}</p>\n"


class Bar(NamedTuple):
    """A pack, as long as its share of the longest one that is shown."""

    pack: Pack
    longest: int
    label: str

    def html(self) -> str:
        parts, total = [], sum(num for _, num in self.pack.parts)
        for place, (kind, num) in enumerate(self.pack.parts):
            begins = " begins" * (place in self.pack.begins[1:])
            parts.append(f'<i class="{kind}{begins}" style="flex-grow:{num}" title="{num:,} {NAMES[kind]}"></i>')
        bar = f'<div class=pack style="width:{100 * total / self.longest:.2f}%">{"".join(parts)}</div>'
        return f"<div class=line><div>{bar}</div>{element('div', self.label, 'quiet')}</div>\n"


class RowText(NamedTuple):
    """The text of a row, or a part of it."""

    text: str

    def html(self) -> str:
        return f"<div class=text dir=auto>{escaped(self.text)}</div>\n"  # its own letters decide its direction


class Tokens(NamedTuple):
    """Tokens of a row, each with what it is for."""

    tokens: list[Token]

    def by_kind(self) -> Iterator[tuple[str, list[str]]]:
        """Neighbours of one kind, and their texts."""
        for kind, group in itertools.groupby(self.tokens, key=lambda token: token[0]):
            yield kind, [text for _, text in group]

    def html(self) -> str:
        blocks = []
        for first in range(0, len(self.tokens), TOKENS_OF_A_BLOCK):
            spans = []
            for kind, texts in Tokens(self.tokens[first : first + TOKENS_OF_A_BLOCK]).by_kind():
                shown = "".join(f"<i>{escaped(text)}</i>".replace("\n", "⏎\n") for text in texts)
                spans.append(f"<span class={kind}>{shown}</span>")
            blocks.append(f"<span class=part>{''.join(spans)}</span>")
        return f"<div class=tokens dir=auto>{''.join(blocks)}</div>\n"
