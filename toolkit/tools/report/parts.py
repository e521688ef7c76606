"""The parts of a report and of a preview, in the order in which they are shown: `page.html.j2` shows them on a page,
`report.text` and `preview.terminal` in a terminal. Both views describe a run's rows by `describe_data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from toolkit.errors import visible

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


class Lines(NamedTuple):
    """Sentences, one per line."""

    lines: Sequence[str]
    kind: str = ""


class Table(NamedTuple):
    """A table with a heading line, not shown without another line; columns that are not `left` hold numbers."""

    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    caption: str = ""
    is_folded: bool = False
    """Shown after a click on its caption."""


class Histogram(NamedTuple):
    """A bar for each (label, number), with the number beside it."""

    bins: list[tuple[str, float]]
    form: str = ","
    outlined: str = ""
    """Label of a bar that is drawn as an outline."""


def load_template(**names: Any) -> Any:
    """The macros of `page.html.j2`, which may use `names`. They show every text escaped, with controls and invisible marks as
    escapes; what is HTML already is a `markupsafe.Markup`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.globals.update(names)
    return environment.get_template("page.html.j2").module


def describe_data(data: Mapping[str, Any], *, prefix: str = "", has_remarks: bool = True) -> Iterator[Any]:
    """The parts of a summary.

    Args:
        prefix: before the first heading, as a run's name.
        has_remarks: with how files were read, and what was left out; a terminal has these lines already.
    """
    yield Heading(f"{prefix}Rows")
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
