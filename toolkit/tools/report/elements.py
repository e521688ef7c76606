"""Elements of a page, with every text escaped."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from typing import Any

from toolkit.errors import visible
from toolkit.tools.report.facts import RunFacts, is_number


def begin_page(title: str, style: str, policy: str) -> str:
    """The start of a page, up to its body; `policy` says what may run and be requested."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
    )


def card(*parts: str) -> str:
    """A box around parts that are HTML already."""
    return f"<div class=card>{''.join(parts)}</div>\n"


def text_table(rows: list[list[str]], *, caption: str = "", left: Collection[int] = (0,)) -> str:
    """A table with a heading line; columns that are not in `left` hold numbers."""

    def line(cells: list[str], tag: str) -> str:
        return "".join(element(tag, cell, "" if i in left else "number", keep=True) for i, cell in enumerate(cells))

    lines = [line(row, "td" if number else "th") for number, row in enumerate(rows)]
    return f"<div class=table tabindex=0><table>{element('caption', caption)}<tr>{'</tr><tr>'.join(lines)}</tr></table></div>\n"


def bar(label: str, share: float, value: str, kind: str = "") -> str:
    """A bar with its label and value; `share` of the longest is 1."""
    style = f"width:{100 * max(0.0, share):.1f}%"
    return f'<span>{escaped(label)}</span><b class="{kind}" style="{style}"></b><span class=number>{value}</span>'


def key(label: str, color: str, dash: str, side: str = "top") -> str:
    """An entry of a legend: a line across, or with `side` left, a vertical one."""
    style = {"dashdot": "dashed"}.get(dash, dash)
    line = f'<i class={side} style="border-{side}:2px {style} {color}"></i>'
    return f"<span class=key>{line}<span class=isolated>{escaped(label)}</span></span>"


def element(tag: str, text: str, kind: str = "", *, keep: bool = False) -> str:
    """An element with a text; nothing without one, unless `keep`."""
    return f"<{tag}{f' class={kind}' if kind else ''}>{escaped(text)}</{tag}>\n" if text or keep else ""


def escaped(text: str) -> str:
    """The text for HTML, with controls and invisible marks as escapes."""
    return html.escape(visible(text))


def format_number(value: Any, num_digits: int = 2) -> str:
    """A number, or a dash for none."""
    return f"{value:.{num_digits}f}" if is_number(value) else "–"


def missing(runs: Sequence[RunFacts], section: str) -> list[str]:
    """A paragraph for each run that lacks what a section needs."""
    return [element("p", run.prefix + run.missing[section], "quiet") for run in runs if section in run.missing]
