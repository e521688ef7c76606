"""A run's rows in figures, as a preview and a report show them: from `Summary.as_dict`, or from `record.json`, which keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tools.report.elements import bar, card, element, text_table

SIDE_NAMES = {
    "row": "Tokens of a training row",
    "counted": "Tokens of a training row that count in the loss",
    "source": "Tokens of a source",
    "target": "Tokens of a target",
}
_COUNTED = ("rows", "tokens", "count in the loss", "share")


def show_rows(data: Mapping[str, Any]) -> str:
    """All of it, as cards of a page."""
    remarks = [element("li", remark, "warn" if remark.startswith("WARNING") else "") for remark in data["remarks"]]
    parts = [element("p", line, "isolated") for line in data["readings"]] + (["<ul>", *remarks, "</ul>"] if remarks else [])
    parts += [text_table(table) for table in (list_splits(data), list_sources(data)) if len(table) > 1]
    parts.append(element("p", f"Duplicates: {'; '.join(data['duplicates']) or 'none'}"))
    tokenizer = [text_table(list_special_tokens(data), left=(3,)), element("p", describe_tokenizer(data), "quiet")]
    return "".join([card(*parts), *map(_show_lengths, data["lengths"]), card(*tokenizer)])


def list_splits(data: Mapping[str, Any]) -> list[list[str]]:
    """The table of the splits."""
    return [["split", *_COUNTED], *([split["name"], *_counts(split)] for split in data["splits"])]


def list_sources(data: Mapping[str, Any]) -> list[list[str]]:
    """The table of the entries of `data.mix`; its heading alone without a mix."""
    cells = [[source["name"], f"{100 * source['weight_share']:.1f} %", *_counts(source)] for source in data["sources"]]
    return [["source", "share of an epoch", *_COUNTED], *cells]


def list_special_tokens(data: Mapping[str, Any]) -> list[list[str]]:
    """The table of the special tokens."""
    cells = [[t["text"], str(t["token_id"]), f"{t['num_in_training']:,}", t["roles"]] for t in data["special_tokens"]]
    return [["token", "id", "in training rows", "role"], *cells]


def describe_tokenizer(data: Mapping[str, Any]) -> str:
    """What the tokenizer is, and what ends a text."""
    stops = f"; a generated text ends at {' or '.join(data['stop_tokens'])}" if data["stop_tokens"] else ""
    return f"{data['tokenizer']}, {'with' if data['chat_template'] else 'without'} a chat template{stops}"


def describe_percentiles(lengths: Mapping[str, Any]) -> str:
    """Shortest 8, p5 9, median 17, longest 30."""
    names = {"0": "shortest", "50": "median", "100": "longest"}
    return ", ".join(f"{names.get(str(key), f'p{key}')} {value:,}" for key, value in lengths["percentiles"].items())


def name_lengths(lengths: Mapping[str, Any]) -> str:
    """What the lengths are of, and the setting that limits them."""
    return SIDE_NAMES[lengths["name"]] + (f" ({lengths['setting']})" if lengths["setting"] else "")


def percent(part: int, whole: int) -> str:
    """A share; of nothing, a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def name_bins(lengths: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(lengths, number of rows) of each bin."""
    return [(f"{low:,}–{high:,}" if high > low else f"{low:,}", count) for low, high, count in lengths["bins"]]


def _show_lengths(lengths: Mapping[str, Any]) -> str:
    most = max(count for *_, count in lengths["bins"])
    bars = [bar(label, count / most, f"{count:,}") for label, count in name_bins(lengths)]
    percentiles = element("p", describe_percentiles(lengths), "quiet")
    return card(element("p", name_lengths(lengths)), percentiles, f"<div class=rank>{''.join(bars)}</div>")


def _counts(of: Mapping[str, Any]) -> list[str]:
    numbers = [of[name] for name in ("num_rows", "num_tokens", "num_label_tokens")]
    return [*(f"{number:,}" for number in numbers), percent(numbers[2], numbers[1])]
