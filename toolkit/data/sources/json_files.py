"""Readers of JSON: one object a line, or one array of objects. Which of them a file is shows at its first character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from toolkit.data.sources.text_files import Cells, Form, open_bytes, open_text
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER, read_json_lines

ROWS_TO_FIND_KEYS_IN = 1000
_CHARS_PER_READ = 1 << 20
_BLANKS = re.compile(r"[ \t\r\n]*")
_WAY_OUT = "write one object a line, or one array of objects"


def read_json(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield each object, with None for those of some keys that it lacks.

    Raises:
        UserError: what is not JSON or not an object; names the line.
    """
    for row in _read_objects(path, form, example_key=columns[0]):
        yield {**dict.fromkeys(columns), **row}


def list_keys(path: Path, form: Form) -> list[str]:
    """The keys of the first thousand objects."""
    objects = islice(_read_objects(path, form, example_key="text"), ROWS_TO_FIND_KEYS_IN)
    return list({key: None for row in objects for key in row})


def _read_objects(path: Path, form: Form, *, example_key: str) -> Iterator[dict[str, Any]]:
    """The objects of a file. Memory holds a line, or what is read at once of an array."""
    with open_text(path, form) as file:
        array = _Array(path, file)
        if array.peek() == "[":
            yield from array.read_objects(example_key)
            return
    with open_bytes(path) as raw, open_text(path, form, newline="") as file:
        # Lines are split as bytes: see `read_json_lines`.
        lines = raw if form.encoding == "utf-8" else (line.encode() for line in file)
        for line, value in read_json_lines(path, lines=lines, way_out=_WAY_OUT):
            yield _check_object(value, f"{path}, line {line}", example_key)


def _check_object(value: Any, where: str, example_key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
        raise UserError(f"{where}: a JSON {kind}, not an object: write {{{example_key!r}: ...}}")
    return value


class _Array:
    """A JSON array that is read block by block: the text from the next value on, and the line on which it begins."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._place, self._line = "", 0, 1

    def read_objects(self, example_key: str) -> Iterator[dict[str, Any]]:
        """The objects in the array; `peek` has found its opening bracket."""
        self._place += 1
        is_over = self.peek() == "]"
        while not is_over:
            yield self._read_object(example_key)
            if (sign := self.peek()) not in ("]", ","):
                raise self._error("no comma or closing bracket after a value", self._place)
            is_over = sign == "]"
            self._place += not is_over
        self._place += 1
        if self.peek():
            raise self._error("text after the end of the array", self._place)

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            found = _BLANKS.match(self._text, self._place)
            self._place = found.end() if found else self._place
            if self._place < len(self._text) or not self._read_on():
                return self._text[self._place : self._place + 1]

    def _read_object(self, example_key: str) -> dict[str, Any]:
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                # A value that the end of the block cuts is an error just before it, as `-Infinit` is: others need no more text.
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - 16
                if not is_cut or not self._read_on():
                    raise self._error(error.msg, error.pos) from None
            except (RecursionError, ValueError) as error:
                raise self._error(str(error), self._place) from None
            else:
                if not isinstance(value, dict):  # counting lines for every object would take most of the time
                    _check_object(value, f"{self._path}, line {self._count_lines(self._place)}", example_key)
                self._place = end
                return value

    def _read_on(self) -> bool:
        """Drop what was read, and read as much again as is left of it, at least a block. False at the end of the file."""
        block = self._file.read(max(_CHARS_PER_READ, len(self._text) - self._place))
        if not block:
            return False
        self._line = self._count_lines(self._place)
        self._text, self._place = self._text[self._place :] + block, 0
        return True

    def _error(self, reason: str, place: int) -> UserError:
        return UserError(f"{self._path}, line {self._count_lines(place)}: not JSON ({reason}): {_WAY_OUT}")

    def _count_lines(self, place: int) -> int:
        """The number of the line at a place of the text."""
        return self._line + self._text.count("\n", 0, place)
