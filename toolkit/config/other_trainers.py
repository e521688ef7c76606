"""Names of our fields in other trainers, as the tables of `migrating.md` have them, the page beside this file.

Spelling alone would mislead: `--report_to` means `tracking.log_with`, but is spelled more like `export`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

_LINE = re.compile(r"^\| `(?:\S+\.)?(\S+)` \| (?:`(\S+)`(?: (\(.+\)))?|(.+)) \|$", re.MULTILINE)
"""A name, and its field with what to write there, or a sentence."""


def find_by_meaning(name: str, fields: Collection[str]) -> list[str]:
    """The `fields` (dotted keys) that another trainer calls `name`."""
    return [field for other, field, _, _ in _lines() if other == _plain(name) and field in fields]


def say_value(name: str) -> str:
    """What to write for the field that another trainer calls `name`, in brackets; empty if its value is the same there."""
    return next((f" {value}" for other, _, value, _ in _lines() if other == _plain(name) and value), "")


def say_elsewhere(name: str) -> str | None:
    """A sentence that says where to set something that is not a field; None if `name` is unknown."""
    return next((sentence for other, _, _, sentence in _lines() if other == _plain(name) and sentence), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _lines() -> list[tuple[str, str, str, str]]:
    """(name, field, value, sentence) of each line of the tables; what it lacks is empty."""
    page = Path(__file__).with_name("migrating.md").read_text(encoding="utf-8")
    return [(_plain(name), field, value, sentence) for name, field, value, sentence in _LINE.findall(page)]
