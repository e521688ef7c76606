"""The texts to generate for: from the command line, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.sources.files import list_columns
from toolkit.data.sources.text_files import Form, read_csv
from toolkit.errors import UserError
from toolkit.files.json_lines import read_json_lines

MESSAGES = "messages"
TEXT_COLUMNS = ("source", "article", "document", "prompt", "instruction", "text")
"""Columns to look for, unless one is named."""


@dataclass(frozen=True)
class Item:
    """What to generate one text for."""

    where: str
    """File and row, for messages."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A chat, without the answer that is to be generated."""


def read_items(file: str | None, texts: list[str], column: str | None, saved_column: str | None) -> tuple[list[Item], str]:
    """The items, and a sentence on how the file was read.

    Args:
        file: a .csv or .jsonl file; `-` is standard input, one text a line.
        column: the user's choice of a column.
        saved_column: the column that the run read.

    Raises:
        UserError: no such file, column or text; with file and row.
    """
    if file is None:
        return [Item(f"--text {i}", text) for i, text in enumerate(texts, start=1)], ""
    if file == "-":
        lines = [line.rstrip("\n") for line in sys.stdin]
        return [Item(f"line {i} of standard input", line) for i, line in enumerate(lines, start=1)], ""
    path = Path(file)
    if path.suffix not in (".csv", ".jsonl"):
        raise UserError(
            f"--file {file} ends with {path.suffix or 'nothing'}: give a .csv or .jsonl file, or - for standard input"
        )
    if not path.is_file():
        raise UserError(f"--file {file} does not exist: check the path")
    try:
        columns = list_columns(path, path.suffix[1:], Form())
        chosen = _choose_column(file, columns, column, saved_column)
        items = [_read_item(cell, chosen, where) for where, cell in _cells(path, chosen)]
    except OSError as error:
        raise UserError(f"--file {file} cannot be read ({error.strerror}): check its permissions") from None
    if not items:
        raise UserError(f"--file {file} has no rows: give a file with rows")
    rest = ", ".join(name for name in columns if name != chosen)
    return items, f"{file}: {len(items):,} rows, column {chosen}" + (f" (not read: {rest})" if rest else "")


def _choose_column(file: str, columns: list[str], wanted: str | None, saved: str | None) -> str:
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f"--file {file} has no column {wanted!r} (its columns: {', '.join(columns)}): correct --column")
        return wanted
    known = [saved] if saved in columns else [name for name in (MESSAGES, *TEXT_COLUMNS) if name in columns]
    known = known or (columns if len(columns) == 1 else [])
    if len(known) != 1:
        found = f"columns {' and '.join(filter(None, known))}" if known else f"columns {', '.join(columns)}"
        raise UserError(f"--file {file} has {found}: name the one to generate for as --column")
    return str(known[0])


def _cells(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".csv":
        for number, cells in enumerate(read_csv(path, [column], Form()), start=1):
            yield f"{path}, row {number}", cells[column]
        return
    for line, row in read_json_lines(path, way_out="write one object a line"):
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {line}: not an object: write {{{column!r}: ...}}")
        yield f"{path}, line {line}", row.get(column)


def _read_item(cell: Any, column: str, where: str) -> Item:
    if isinstance(cell, str) and cell.strip():
        return Item(where, cell)
    if isinstance(cell, list) and cell and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in cell):
        messages = list(cell)
        while messages and messages[-1]["role"] == "assistant":  # a row to train on has the answer too
            messages.pop()
        if messages:
            return Item(where, messages=messages)
    raise UserError(f"{where}, column {column}: {cell!r:.60} is neither a text nor a chat: correct or remove the row")
