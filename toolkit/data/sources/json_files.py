"""Readers of JSON: one object per line, one array of objects, or one object that holds them all.

An array shows at its first character, an object of rows where no other follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from toolkit.data.sources.row import list_parts
from toolkit.data.sources.text_files import Cells, Form, open_bytes, open_text
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER, read_json_lines

ROWS_TO_FIND_KEYS_IN = 1000
_BLANKS = re.compile(r"[ \t\r\n]*")
_WAY_OUT = "write one object per line, or one array of objects"


def read_json(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield each object, with None for those of some keys that it lacks; a `UserError` names the line of anything else."""
    for row in _read_objects(path, form, example_key=columns[0]):
        yield {**dict.fromkeys(name for name in columns if "." not in name), **row}


def list_keys(path: Path, form: Form) -> list[str]:
    """The keys of the first thousand objects, as `list_parts`."""
    objects = islice(_read_objects(path, form, example_key="text"), ROWS_TO_FIND_KEYS_IN)
    return list({key: None for row in objects for key in list_parts(row)})


def list_fields(path: Path, form: Form) -> list[str]:
    """Under which keys a file that is one object has lists of objects."""
    with open_text(path, form) as file:
        whole = _read_whole(file) or {}
    return [key for key, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)]


def _read_objects(path: Path, form: Form, *, example_key: str) -> Iterator[dict[str, Any]]:
    """The objects of a file. Memory holds a line, or all text of an array."""
    with open_text(path, form) as file:
        begin = ""
        while (char := file.read(1)).isspace():
            begin += char
        if char == "[" and form.field is None:
            yield from _read_array(path, begin + char + file.read(), len(begin), example_key)
            return
    with open_text(path, form) as file:
        whole = _read_whole(file)
    if form.field is not None and not isinstance((whole or {}).get(form.field), list):
        raise UserError(f"data.field is {form.field}, but {path} is not an object with a list there: correct it, or leave it out")
    if whole is not None:
        for number, row in enumerate(_list_rows(whole, form.field), start=1):
            yield _check_object(row, f"{path}, row {number}", example_key)
        return
    with open_bytes(path) as raw, open_text(path, form, newline="") as file:
        # Lines are split as bytes: see `read_json_lines`.
        lines = raw if form.encoding == "utf-8" else (line.encode() for line in file)
        for line, value in read_json_lines(path, lines=lines, way_out=_WAY_OUT):
            yield _check_object(value, f"{path}, line {line}", example_key)


def _read_whole(file: TextIO) -> dict[str, Any] | None:
    """The object that is all of a file; None if it has lines of objects, or is broken."""
    value, line = None, next(filter(str.strip, file), "")
    try:
        value = DECODER.decode(line)
    except (ValueError, RecursionError):
        with suppress(ValueError, RecursionError):
            value = DECODER.decode(line + file.read())
    return value if isinstance(value, dict) and not any(map(str.strip, file)) else None


def _list_rows(whole: dict[str, Any], field: str | None) -> list[Any]:
    """The rows under a key of an object, or those that pandas has written as one, by its `orient`; else the object itself."""

    first, *others = list(whole.values()) or [None]
    if field is not None:
        return list(whole[field])
    if isinstance(first, dict) and first and all(isinstance(value, dict) for value in others):
        if "".join(first).isdecimal() and all(value.keys() == first.keys() for value in others):
            return [{column: cells[row] for column, cells in whole.items()} for row in first]  # columns, the default
        return list(whole.values()) if "".join(whole).isdecimal() else [whole]  # index
    columns = [value for value in whole.values() if isinstance(value, list)]
    is_deep = any(isinstance(cell, dict | list) for cells in columns for cell in cells)
    if len(columns) == len(whole) > 0 and len({*map(len, columns)}) == 1 and not is_deep:  # `DataFrame.to_dict("list")`
        return [dict(zip(whole, cells, strict=True)) for cells in zip(*columns, strict=True)]
    names, table = whole.get("columns"), whole.get("data")
    if whole.keys() <= {"columns", "index", "data"} and isinstance(names, list) and isinstance(table, list):  # split
        return [dict(zip(map(str, names), cells, strict=False)) for cells in table]
    return [whole]


def _check_object(value: Any, where: str, example_key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {value!r:.60} is not a JSON object: write {{{example_key!r}: ...}}")
    return value


def _read_array(path: Path, text: str, place: int, example_key: str) -> Iterator[dict[str, Any]]:
    """The objects of an array, one at a time; its opening bracket stands at `place`."""

    def find_next(place: int) -> int:
        return _BLANKS.match(text, place).end()  # type: ignore[union-attr]  # it matches the empty text

    def count_lines(place: int) -> int:
        return text.count("\n", 0, place) + 1

    def refuse(reason: str, place: int) -> UserError:
        return UserError(f"{path}, line {count_lines(place)}: not JSON ({reason}): {_WAY_OUT}")

    place = find_next(place + 1)
    while not text.startswith("]", place):
        try:
            value, end = DECODER.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise refuse(error.msg, error.pos) from None
        except (RecursionError, ValueError) as error:
            raise refuse(str(error), place) from None
        if not isinstance(value, dict):  # counting lines for every object would take most of the time
            _check_object(value, f"{path}, line {count_lines(place)}", example_key)
        yield value
        place = find_next(end)
        if text.startswith(",", place):
            place = find_next(place + 1)
        elif not text.startswith("]", place):
            raise refuse("no comma or closing bracket after a value", place)
    if (place := find_next(place + 1)) < len(text):
        raise refuse("text after the end of the array", place)
