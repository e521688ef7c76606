"""The texts to generate for: from the command line, a file or standard input."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.rows.instructions import read_alpaca, read_turn
from toolkit.data.rows.messages import TOOLS_COLUMN, read_json, read_messages, read_tools
from toolkit.data.sources.files import READERS, find_kind, hash_file, list_columns
from toolkit.data.sources.text_files import Form, suggest_delimiter
from toolkit.errors import UserError

MESSAGES, SHAREGPT, ALPACA = "messages", "conversations", ("instruction", "input", "system", "history")
TEXT_COLUMNS = ("source", "article", "document", "prompt", "text")
"""Columns to look for, unless one is named."""
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True)
class Item:
    """What to generate one text for."""

    where: str
    """File and row, for messages."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A chat, without the answer that is to be generated. With a text too, it is taken where there is a chat template."""
    tools: list[Any] | None = None


def read_items(
    file: str | None, texts: list[str], column: str | None, saved_column: str | None, form: Form, *, may_be_utf8: bool = False
) -> tuple[list[Item], str]:
    """The items, and a sentence on how the file was read.

    Args:
        file: a file of one of `READERS`; `-` is standard input, one text a line.
        column: the user's choice of a column.
        saved_column: the column that the run read.
        form: how text files are written.
        may_be_utf8: a file in UTF-8 is read as such, whatever the form says: only the run's files are known to be written so.

    Raises:
        UserError: no such file, column or text; with file and row.
    """
    if file is None:
        return [Item(f"--text {i}", text) for i, text in enumerate(texts, start=1)], ""
    if file == "-":
        lines = [line.rstrip("\n") for line in sys.stdin]
        return [Item(f"line {i} of standard input", line) for i, line in enumerate(lines, start=1)], ""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--file {file} does not exist, or is no file: check the path")
    kind = find_kind(path, "--file")
    given, is_text = form.encoding, kind not in ("parquet", "arrow")
    if may_be_utf8 and is_text and given != "utf-8":
        with suppress(UserError):
            hash_file(path, is_text=True)
            form = form._replace(encoding="utf-8")
    hash_file(path, is_text=is_text, encoding=form.encoding)  # reads all of it once, to check it
    columns = list_columns(path, kind, form)
    chosen = _choose_columns(file, columns, column, saved_column, suggest_delimiter(columns, form))
    rows = READERS[kind](path, chosen, form)
    items = [_read_item(cells, chosen, f"{path}, row {number}") for number, cells in enumerate(rows, start=1)]
    if not items:
        raise UserError(f"--file {file} has no rows: give a file with rows")
    rest = ", ".join(name for name in columns if name not in chosen)
    how = f"{file}: {len(items):,} rows, from {' and '.join(chosen)}" + (f" (not read: {rest})" if rest else "")
    return items, how + (f", read as {form.encoding}" if form.encoding != given else "")


def _choose_columns(file: str, columns: list[str], wanted: str | None, saved: str | None, hint: str) -> tuple[str, ...]:
    """The column to read; of Alpaca's, all that there are."""
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f"--file {file} has no column {wanted!r} (its columns: {', '.join(columns)}): correct --column{hint}")
        return _with_optional(wanted, columns)
    if saved in columns:
        return (str(saved),)
    readings = [_with_optional(name, columns) for name in (MESSAGES, SHAREGPT, *TEXT_COLUMNS) if name in columns]
    if ALPACA[0] in columns:
        readings.append(tuple(name for name in ALPACA if name in columns))
    if not readings and len(columns) == 1 and not hint:
        readings = [tuple(columns)]
    if len(readings) != 1:
        found = " and ".join(reading[0] for reading in readings) or ", ".join(columns)
        raise UserError(f"--file {file} has the columns {found}: name the one to generate for as --column{hint}")
    return readings[0]


def _with_optional(column: str, columns: list[str]) -> tuple[str, ...]:
    """A column, and those that belong to its chats."""
    optional = {MESSAGES: (TOOLS_COLUMN,), SHAREGPT: ("system", TOOLS_COLUMN)}.get(column, ())
    return (column, *(name for name in optional if name in columns))


def _read_item(cells: dict[str, Any], chosen: tuple[str, ...], where: str) -> Item:
    if chosen[0] == ALPACA[0] and cells[ALPACA[0]]:
        chat, text = (read_alpaca({**cells, "output": "-"}, where, is_chat=is_chat) for is_chat in (True, False))
        if isinstance(chat, dict) and isinstance(text, dict):
            return Item(where, text["prompt"], chat["messages"][:-1])
    cell = cells[chosen[0]]
    if isinstance(cell, str) and chosen[0] in (MESSAGES, SHAREGPT) and _LIST_OF_OBJECTS.match(cell):
        cell = read_json(cell, f"{where}, column {chosen[0]}")
    if isinstance(cell, str) and cell.strip():
        return Item(where, cell)
    if isinstance(cell, list) and cell and all(isinstance(turn, dict) for turn in cell):
        is_sharegpt = any("from" in turn for turn in cell)
        turns = [read_turn(turn, where) if is_sharegpt else turn for turn in cell]
        if isinstance(cells.get("system"), str) and cells["system"].strip():
            turns.insert(0, {"role": "system", "content": cells["system"]})
        while turns and turns[-1].get("role") == "assistant":  # a row to train on has the answer too
            turns.pop()
        if turns:
            messages = [{key: message[key] for key in message if key != "weight"} for message in read_messages(turns, where)]
            return Item(where, messages=messages, tools=read_tools(cells.get(TOOLS_COLUMN), where))
    raise UserError(f"{where}, column {chosen[0]}: {cell!r:.60} is neither a text nor a chat: correct or remove the row")
