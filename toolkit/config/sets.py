"""Named evaluation sets: files under a name in `data.eval_files`, entries of `data.mix`, and a dataset's own split."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from toolkit.errors import UserError


def name_entries(data: Any) -> list[str]:
    """The set of the evaluation rows of each entry of `data.mix`, or of the only source; an empty name is none."""
    if len(data.mix) < 2:
        split = data.hub_eval_split if isinstance(data.eval_files, dict) else ""
        return [data.mix[0].name or "" if data.mix else split or ""]
    names = [entry.name or Path(entry.source).name for entry in data.mix]
    is_clear = [bool(entry.name or (name and names.count(name) == 1)) for entry, name in zip(data.mix, names, strict=True)]
    return [name if clear else f"mix[{place}]" for place, (name, clear) in enumerate(zip(names, is_clear, strict=True))]


def list_sets(data: Any) -> list[str]:
    """The names of the sets that rows are evaluated in."""
    named, entries = data.eval_files if isinstance(data.eval_files, dict) else {}, data.mix or [data]
    is_held_out = not data.eval_files and not any(entry.hub_eval_split for entry in entries)
    of_entries = zip(name_entries(data), entries, strict=True)
    return list(dict.fromkeys([*named, *(name for name, of in of_entries if name and (is_held_out or of.hub_eval_split))]))


def check_set_names(data: Any, figures: Collection[str]) -> None:
    """Check that a figure `NAME/loss` says whose it is, and that every name in `data.eval_files` has files.

    A `UserError` has the name. `figures` are names of figures and metrics, which no set may have.
    """
    named = data.eval_files if isinstance(data.eval_files, dict) else {}
    for name in list_sets(data):
        where = "data.eval_files" if name in named else "data.mix" if data.mix else "data.hub_eval_split"
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or "/" in name:
            raise UserError(f"{where} names an evaluation set {name!r}: take a text without slashes, as in news or '2024'")
        if name in figures:
            raise UserError(f"{where} names an evaluation set {name}, which is the name of a metric: take another")
        if name in named and not named[name]:
            raise UserError(f"{where} has no file under the name {name}: give one, or leave the name out")
