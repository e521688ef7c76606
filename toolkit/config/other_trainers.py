"""Names of our fields in other trainers, as the tables of `migrating.md` have them, the page beside this file.

Spelling alone would mislead: `--report_to` means `tracking.log_with`, but is spelled more like `export`.
"""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(r"^\| `(?:\S+\.)?(\S+)` \| (?:`(\S+)`(?: (\(.+\)))?|(.+)) \|$", re.MULTILINE)
"""A name, and its field with what to write there, or a sentence."""


def find_meanings(name: str) -> list[tuple[str, str, str]]:
    """What `name` means in other trainers, by the lines of the tables: our field as a dotted key, and what to write for it, in
    brackets (empty: the same value); or two empty texts, and a sentence that says where to set something that is not a field."""
    page = Path(__file__).with_name("migrating.md").read_text(encoding="utf-8")
    return [(field, value, text) for other, field, value, text in _LINE.findall(page) if _plain(other) == _plain(name)]


def say_elsewhere(name: str) -> str | None:
    """A sentence that says where to set something that is not a field; None if `name` is unknown."""
    return next((text for _, _, text in find_meanings(name) if text), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
