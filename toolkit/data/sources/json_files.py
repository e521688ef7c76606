"""Readers of JSON: one object per line, one array of objects, or one object that holds them all.

An array shows at its first character, an object of rows where no other follows it. Rows may also stand in a list in each line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from toolkit.data.sources.row import list_parts, take_part
from toolkit.data.sources.text_files import Cells, Form, open_bytes, open_text
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER, read_json_lines

ROWS_TO_FIND_KEYS_IN = 1000
_BLANKS = re.compile(r"[ \t\r\n]*")
ALL_VALUES = "*"
"""In place of the key under which a file's rows are: each of its values is one."""
_TURNS = ({"role", "content"}, {"from", "value"})
_WAY_OUT = "write one object per line, or one array of objects"


def read_json(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield each object, with None for those of some keys that it lacks; a `UserError` names the line of anything else."""
    for row in _read_objects(path, form, column=columns[0]):
        yield {**dict.fromkeys(name for name in columns if "." not in name), **row}


def list_keys(path: Path, form: Form) -> list[str]:
    """The keys of the first thousand objects, as `list_parts`."""
    objects = islice(_read_objects(path, form, column="text"), ROWS_TO_FIND_KEYS_IN)
    return list({key: None for row in objects for key in list_parts(row)})


def list_fields(path: Path, form: Form) -> tuple[list[str], list[str]]:
    """Where the rows of a file with one object can only be, in the order to try, and where its first object has lists of objects
    that are not turns, the outermost."""
    with open_text(path, form) as file:
        first, is_all = _read_first(file)
    fields, level = list[str](), first
    while level and not fields:
        lists = {name: value[0] for name, value in level.items() if isinstance(value, list) and value}
        fields = [name for name, row in lists.items() if isinstance(row, dict) and not any(map(row.keys().__ge__, _TURNS))]
        inside = [(name, value) for name, value in level.items() if isinstance(value, dict)]
        level = {f"{name}.{key}": value for name, inner in inside for key, value in inner.items()}
    guesses = [ALL_VALUES] * bool(first and all(isinstance(value, dict) for value in first.values()))
    return (guesses + fields * (len(fields) == 1)) * is_all, fields


def _read_objects(path: Path, form: Form, *, column: str) -> Iterator[dict[str, Any]]:
    """The objects of a file, of which one `column` is read. Memory holds a line, or all text of an array."""
    with open_text(path, form) as file:
        begin = ""
        while (char := file.read(1)).isspace():
            begin += char
        if char == "[":
            if form.field is not None:
                _take_list(path, [], form.field)  # refuses it
            yield from _read_array(path, begin + char + file.read(), len(begin), column)
            return
    with open_text(path, form) as file:
        whole, is_all = _read_first(file)
    if is_all:
        for number, row in enumerate(_list_rows(path, whole, form.field, column), start=1):
            yield _check_object(row, f"{path}, row {number}", column)
        return
    with open_bytes(path) as raw, open_text(path, form, newline="") as file:
        # Lines are split as bytes: see `read_json_lines`.
        lines = raw if form.encoding == "utf-8" else (line.encode() for line in file)
        for line, value in read_json_lines(path, lines=lines, remedy=_WAY_OUT):
            where = f"{path}, line {line}"
            for row in [value] if form.field is None else _take_list(where, value, form.field):
                yield _check_object(row, where, column)


def _read_first(file: TextIO) -> tuple[dict[str, Any], bool]:
    """The first object of a file, and whether it is all of the file; an empty one if there is none."""
    value, line = None, next(filter(str.strip, file), "")
    try:
        value = DECODER.decode(line)
    except (ValueError, RecursionError):
        with suppress(ValueError, RecursionError):
            value = DECODER.decode(line + file.read())
    return (value, not any(map(str.strip, file))) if isinstance(value, dict) else ({}, False)


def _list_rows(path: Path, whole: dict[str, Any], field: str | None, column: str) -> list[Any]:
    """The rows under a key of an object, or those that pandas has written as one, by its `orient`; else the object itself."""
    cells = [*whole.values()]
    if field is not None:
        return cells if field == ALL_VALUES else _take_list(path, whole, field)
    keys = [value.keys() if isinstance(value, dict) else () for value in cells] or [()]
    is_table = keys[0] and all(other == keys[0] for other in keys)
    if is_table and ("".join(keys[0]).isdecimal() or isinstance(whole.get(column), dict)):
        return [{name: cells[row] for name, cells in whole.items()} for row in cells[0]]  # columns, the default
    columns = [value for value in cells if isinstance(value, list)]
    is_deep = any(isinstance(cell, dict | list) for cells in columns for cell in cells)
    if len(columns) == len(whole) > 0 and len({*map(len, columns)}) == 1 and not is_deep:  # `DataFrame.to_dict("list")`
        return [dict(zip(whole, cells, strict=True)) for cells in zip(*columns, strict=True)]
    names, table = whole.get("columns"), whole.get("data")
    if whole.keys() <= {"columns", "index", "data"} and isinstance(names, list) and isinstance(table, list):  # split
        return [dict(zip(map(str, names), cells, strict=False)) for cells in table]
    return [whole]


def _take_list(where: object, value: Any, field: str) -> list[Any]:
    if not isinstance(found := take_part(value if isinstance(value, dict) else {}, field), list):
        raise UserError(f"data.field is {field}, but {where} is not an object with a list there: correct it, or leave it out")
    return found


def _check_object(value: Any, where: str, column: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {value!r:.60} is not a JSON object: write {{{column!r}: ...}}")
    return value


def _read_array(path: Path, text: str, place: int, column: str) -> Iterator[dict[str, Any]]:
    """The objects of an array, and of others after it, one at a time; its opening bracket stands at `place`."""

    def find_next(place: int) -> int:
        return _BLANKS.match(text, place).end()  # type: ignore[union-attr]  # it matches the empty text

    def count_lines(place: int) -> int:
        return text.count("\n", 0, place) + 1

    def refuse(reason: str, place: int) -> UserError:
        return UserError(f"{path}, line {count_lines(place)}: not JSON ({reason}): {_WAY_OUT}")

    while place < len(text):
        if text[place] != "[":
            raise refuse("text after the end of the array", place)
        place = find_next(place + 1)
        while not text.startswith("]", place):
            try:
                value, end = DECODER.raw_decode(text, place)
            except json.JSONDecodeError as error:
                raise refuse(error.msg, error.pos) from None
            except (RecursionError, ValueError) as error:
                raise refuse(str(error), place) from None
            if not isinstance(value, dict):  # counting lines for every object would take most of the time
                _check_object(value, f"{path}, line {count_lines(place)}", column)
            yield value
            place = find_next(end)
            if text.startswith(",", place):
                place = find_next(place + 1)
            elif not text.startswith("]", place):
                raise refuse("no comma or closing bracket after a value", place)
        place = find_next(place + 1)
