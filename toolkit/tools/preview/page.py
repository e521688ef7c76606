"""The view as one self-contained HTML page: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from toolkit.tools.preview.wording import NAMES, Bar, Legend, Preview, RowText, Tokens, list_parts
from toolkit.tools.report.elements import begin_page, element, escaped
from toolkit.tools.report.rows import render

TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


def render_page(preview: Preview) -> str:
    """The page. Every text goes through `escaped`, which leaves nothing that HTML or a terminal would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = begin_page(preview.title, style, "default-src 'none'; style-src 'unsafe-inline'")
    return f"{head}{render(list_parts(preview, has_remarks=True), _draw)}</body>\n</html>\n"


def _draw(part: Any) -> str:
    """The HTML of a part that only a preview has."""
    match part:
        case Legend(kinds):
            keys = [f'<span class="key {kind}">{NAMES[kind]}</span>' for kind in kinds]
            return f"<p>{''.join(keys)}</p>\n"
        case Bar(pack, longest, label):
            total = sum(num for _, num in pack.parts)
            parts = []
            for place, (kind, num) in enumerate(pack.parts):
                begins = " begins" * (place in pack.begins[1:])
                parts.append(f'<i class="{kind}{begins}" style="flex-grow:{num}" title="{num:,} {NAMES[kind]}"></i>')
            bar = f'<div class=pack style="width:{100 * total / longest:.2f}%">{"".join(parts)}</div>'
            return f"<div class=line><div>{bar}</div>{element('div', label, 'quiet')}</div>\n"
        case RowText(text):
            return f"<div class=text dir=auto>{escaped(text)}</div>\n"  # its own letters decide its direction
        case Tokens(tokens):
            blocks = [Tokens(tokens[first : first + TOKENS_OF_A_BLOCK]) for first in range(0, len(tokens), TOKENS_OF_A_BLOCK)]
            return f"<div class=tokens dir=auto>{''.join(map(_draw_block, blocks))}</div>\n"
    return str(part.html())


def _draw_block(block: Tokens) -> str:
    spans = []
    for kind, texts in block.by_kind():
        shown = "".join(f"<i>{escaped(text)}</i>".replace("\n", "⏎\n") for text in texts)
        spans.append(f"<span class={kind}>{shown}</span>")
    return f"<span class=part>{''.join(spans)}</span>"
