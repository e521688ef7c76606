"""Figures of named evaluation sets, `NAME/loss`: whose a figure is, and which lines of a run compare.

The `measured_on` of an evaluation has a hash of each set's rows in `sets`, beside that of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def split_metric(metric: str, sets: Collection[str]) -> tuple[str, str]:
    """`news/rougeL` → `news` and `rougeL`, where `news` is one of the sets; a figure of all rows has the set `""`."""
    first, _, rest = metric.partition("/")
    return (first, rest) if first in sets else ("", metric)


def hashes_of_sets(line: Mapping[str, Any]) -> dict[str, str]:
    """By name, the sets in the `measured_on` of an evaluation's line; older runs have none."""
    return (line.get("measured_on") or {}).get("sets") or {}


def of_all_rows(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `measured_on` of a line without its sets: what decides the figures of all rows."""
    measured_on = line.get("measured_on")
    return measured_on and {key: value for key, value in measured_on.items() if key != "sets"}


def list_by_set(lines: Mapping[str, Mapping[str, Any]], sets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By label, the figures of all rows; then those of each of `sets` by their plain names, labelled `NAME: label`.

    A line that was measured on other rows under a set's name gives it none.
    """
    listed = {label: {key: line[key] for key in line if not split_metric(key, sets)[0]} for label, line in lines.items()}
    for name, rows in sets.items():
        for label, line in lines.items():
            figures = {key.removeprefix(f"{name}/"): line[key] for key in line if split_metric(key, sets)[0] == name}
            if figures and hashes_of_sets(line).get(name, rows) == rows:
                listed[f"{name}: {label}"] = figures
    return listed
