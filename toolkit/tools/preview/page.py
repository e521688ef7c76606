"""The parts that only a preview has, and a view as one self-contained HTML page: no script, no request, light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from markupsafe import Markup

from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, Token
from toolkit.tools.preview.step import Pack
from toolkit.tools.report.parts import load_template

NAMES = {LOSS: "counts in the loss", CONTEXT: "context", PADDING: "padding", LOST: "cut off"}
TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


def render_page(title: str, parts: Iterable[Any]) -> str:
    """The page of these parts, and of those of `report.parts`, styled as reports. Nothing is left that HTML would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    template = load_template(NAMES=NAMES)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return str(template.page(title, policy, template.flow(parts), Markup(style)))


class Legend(NamedTuple):
    """The kinds of tokens, or of parts of bars."""

    kinds: Sequence[str]
    is_of_bars: bool = False


class Bar(NamedTuple):
    """A pack, as long as its share of the longest one that is shown."""

    pack: Pack
    longest: int
    label: str


class RowText(NamedTuple):
    """The text of a row, or a part of it."""

    text: str


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
