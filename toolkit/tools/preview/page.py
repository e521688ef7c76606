"""The view as one self-contained HTML page: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from toolkit.tools.preview import wording
from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, RowView, Side, Span
from toolkit.tools.preview.step import Pack, StepView
from toolkit.tools.preview.wording import NAMES
from toolkit.tools.report.elements import element, escaped
from toolkit.tools.report.rows import show_rows

if TYPE_CHECKING:
    from toolkit.tools.preview.facts import Preview

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""

TOKENS_OF_A_BLOCK = 2000
"""A browser's time to lay out a block grows with the square of its elements: a megabyte in one block did not open in 30 s."""


def render_page(preview: Preview) -> str:
    """The page. Every text goes through `escaped`, which leaves nothing that HTML or a terminal would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    parts = [HEAD, f"<title>{escaped(preview.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"]
    parts += [element("h1", preview.title), element("p", preview.processes, "quiet")]
    if preview.summary:
        parts += [element("h2", "Data"), show_rows(preview.summary.as_dict())]
    if preview.step:
        parts.append(_render_step(preview.step))
    parts += _rows(preview)
    return "".join([*parts, "</body>\n</html>\n"])


def _render_step(step: StepView) -> str:
    parts = [element("h2", f"Step 1 of {step.num_steps:,} ({step.steps_per_epoch:,} an epoch)"), "<div class=card>"]
    parts += [element("p", line) for line in wording.describe_step(step)]
    parts += [_legend((LOSS, CONTEXT, PADDING))]
    longest = max(sum(num for _, num in pack.parts) for pack in step.first_packs)
    place = None
    for pack in step.first_packs:
        if place != (pack.rank, pack.micro_batch):
            place = (pack.rank, pack.micro_batch)
            parts.append(element("h4", f"Process {pack.rank}, micro-batch {pack.micro_batch + 1}"))
        parts.append(_bar(pack, longest))
    return "".join([*parts, element("p", wording.not_shown(step), "quiet"), "</div>\n"])


def _bar(pack: Pack, longest: int) -> str:
    total = sum(num for _, num in pack.parts)
    parts = [
        f'<i class="{kind}{" begins" * (place in pack.begins[1:])}" style="flex-grow:{num}" title="{num:,} {NAMES[kind]}"></i>'
        for place, (kind, num) in enumerate(pack.parts)
    ]
    rows = f"{'row' if len(pack.row_ids) == 1 else 'rows'} {', '.join(map(str, pack.row_ids))}"
    bar = f'<div class=pack style="width:{100 * total / longest:.2f}%">{"".join(parts)}</div>'
    return f"<div class=line><div>{bar}</div>{element('div', rows, 'quiet')}</div>\n"


def _rows(preview: Preview) -> Iterable[str]:
    if preview.rows:
        yield element("h2", "Rows") + _legend((LOSS, CONTEXT, LOST))
    for row in preview.rows:
        yield _render_row(row, preview.step, is_whole=preview.is_whole)


def _render_row(row: RowView, step: StepView | None, *, is_whole: bool) -> str:
    heading, *lines = wording.describe_row(row, step)
    parts = ["<div class=card>", element("h3", heading), *(element("p", line, "quiet") for line in lines)]
    turns = [element("li", line) for line in wording.describe_turns(row)]
    parts += ["<ul class=quiet>", *turns, "</ul>"] if turns else []
    for side in row.sides:
        parts.append(element("h4", f"{side.name.capitalize()}: {wording.describe_side(side)}"))
        texts = wording.shorten_text(side.text, row.row_id, is_whole=is_whole)
        parts += [element("div", text, "quiet") if i == 1 else _block("text", escaped(text)) for i, text in enumerate(texts)]
        parts.append(element("div", "as tokens", "quiet"))
        parts.append(_tokens(side, wording.padding_behind(row, step, side), row.row_id, is_whole))
    return "".join([*parts, "</div>\n"])


def _tokens(side: Side, padding: int, row_id: int, is_whole: bool) -> str:
    parts = [
        element("div", piece, "quiet") if isinstance(piece, str) else _block("tokens", "".join(map(_part, _in_parts(piece))))
        for piece in wording.shorten_spans(side.spans, row_id, is_whole=is_whole)
    ]
    behind = f"<span class=padding>{wording.plural(padding, 'token')} of padding</span>\n" if padding else ""
    return "".join([*parts, behind])


def _block(kind: str, content: str) -> str:
    """A text; its own letters decide its direction."""
    return f"<div class={kind} dir=auto>{content}</div>\n"


def _in_parts(spans: list[Span]) -> Iterator[list[Span]]:
    """The same tokens, `TOKENS_OF_A_BLOCK` at most at a time."""
    pairs = [(span.kind, token) for span in spans for token in span.tokens]
    for first in range(0, len(pairs), TOKENS_OF_A_BLOCK):
        groups = itertools.groupby(pairs[first : first + TOKENS_OF_A_BLOCK], key=lambda pair: pair[0])
        yield [Span(kind, [token for _, token in group]) for kind, group in groups]


def _part(spans: list[Span]) -> str:
    return f"<span class=part>{''.join(map(_span, spans))}</span>"


def _span(span: Span) -> str:
    tokens = "".join(f"<i>{escaped(token).replace(chr(10), '⏎' + chr(10))}</i>" for token in span.tokens)
    return f"<span class={span.kind}>{tokens}</span>"


def _legend(kinds: Sequence[str]) -> str:
    keys = [f'<span class="key {kind}">{NAMES[kind]}</span>' for kind in kinds]
    return f"<p>{''.join(keys)}</p>\n"
