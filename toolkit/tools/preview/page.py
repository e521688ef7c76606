"""The view as one self-contained HTML page: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from markupsafe import Markup

from toolkit.tools.preview.row import Span, build_spans
from toolkit.tools.preview.wording import NAMES, Preview, Tokens, list_parts
from toolkit.tools.report.parts import load_template

TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


def render_page(preview: Preview) -> str:
    """The page. The template escapes every text, and leaves nothing that HTML or a terminal would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    template = load_template(NAMES=NAMES, blocks=_blocks)
    body = template.flow(list_parts(preview, has_remarks=True))
    return str(template.page(preview.title, Markup(style), "default-src 'none'; style-src 'unsafe-inline'", body))


def _blocks(part: Tokens) -> Iterator[list[Span]]:
    pairs = [(kind, token) for kind, tokens in part.spans for token in tokens]
    for first in range(0, len(pairs), TOKENS_OF_A_BLOCK):
        yield build_spans(pairs[first : first + TOKENS_OF_A_BLOCK])
