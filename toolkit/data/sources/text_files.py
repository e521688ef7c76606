"""Readers of CSV, TSV, JSON and plain text, also gzipped, in any encoding; one row in memory at a time.

JSON is one object per line, one array of objects, or one object that holds them all. An array shows at its first character, an
object of rows where no other follows it. Rows may also stand in a list in each line.
"""

import codecs
import csv
import gzip
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from toolkit.data.sources.row import list_parts, show_names, take_part
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER, read_json_lines

Cells = dict[str, Any]
"""One row's values of the requested columns, unchecked."""

GZIP_MAGIC = b"\x1f\x8b"
# The csv module's default limit of 131,072 characters per cell is too low for real articles. This one fits a 32-bit C long.
_LARGEST_CELL_CHARS = 2**31 - 1
MISSING = frozenset(
    "NaN,nan,-NaN,-nan,N/A,n/a,NA,<NA>,#N/A,#NA,#N/A N/A,None,NULL,null,1.#IND,-1.#IND,1.#QNAN,-1.#QNAN".split(",")  # noqa: SIM905
)
"""Cells of CSV and TSV files that are read as NaN, as pandas reads them, and so `datasets` in folders; R writes `NA`."""
_CELL = r'(?:"[^"]*+(?:""[^"]*+)*+"|[^"\t]*+)'
_QUOTED_LINE = re.compile(rf"(?:{_CELL}\t)*{_CELL}")
"""A line of a TSV file whose quotes stand around cells."""
ROWS_TO_FIND_KEYS_IN = 1000
_BLANKS = re.compile(r"[ \t\r\n]*")
ALL_VALUES = "*"
"""In place of the key under which a file's rows are: each of its values is one."""
_TURNS = ({"role", "content"}, {"from", "value"})
_WAY_OUT = "write one object per line, or one array of objects"


class Form(NamedTuple):
    """How text files are written, beyond their kind."""

    encoding: str = "utf-8"
    delimiter: str = ","
    """Between the cells of CSV files."""
    field: str | None = None
    """Under which key of JSON objects the rows are, as in `x.data`."""
    text_quote: int = 0
    """Of a TSV file: the line that shows that double quotes are text in it; 0 where they stand around cells."""


def build_form(delimiter: str | None, encoding: str | None) -> Form:
    """The form that `data.csv_delimiter` (one character) and `data.encoding` (one that Python knows) name; or a `UserError`."""
    form = Form()
    if delimiter is not None:
        form = form._replace(delimiter="\t" if delimiter == r"\t" else delimiter)
        if len(form.delimiter) != 1 or form.delimiter in '"\r\n\0':
            raise UserError(f"data.csv_delimiter is {delimiter!r}: give one character, as in ';' or '|', or \\t for a tab")
    if encoding is not None:
        try:
            "a".encode(encoding).decode(encoding, "ignore")  # fails for codecs that are not of text, too
            form = form._replace(encoding=codecs.lookup(encoding).name)
        except (LookupError, ValueError):
            raise UserError(
                f"data.encoding is {encoding!r}, which Python does not know: give a name such as utf-8, cp1252 or utf-16"
            ) from None
    return form


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, uncompressed if it begins as a gzip file does."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == GZIP_MAGIC
    return gzip.open(path) if is_gzip else path.open("rb")  # type: ignore[return-value]


def open_text(path: Path, form: Form, newline: str | None = None) -> TextIO:
    """Open a text file, without its byte order mark."""
    file = io.TextIOWrapper(open_bytes(path), encoding=form.encoding, newline=newline)
    if file.read(1) != "\ufeff":
        file.seek(0)
    return file


def read_csv(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of a delimited file with a header, row by row. A cell is text, or NaN if it is `MISSING`. A
    TSV file needs the form of `find_quotes`. Too many or too few cells, or broken quoting, are a `UserError` with the line."""
    records = _read_records(path, form)
    _, header = next(records, (1, []))
    places = {column: header.index(column) for column in columns}
    remedy = f"put double quotes around cells that hold {_name(form.delimiter)}"
    if form.text_quote:
        remedy = (
            f"no cell may hold tabs or line breaks, because double quotes are text here, as in line {form.text_quote}; "
            r"where they stand around cells, give --data.source csv --data.csv_delimiter '\t'"
        )
    for line, cells in records:
        if len(cells) != len(header):
            if len(cells) < len(header) and not form.text_quote:
                remedy = "write every cell of the row, an empty one too"
            raise UserError(
                f"{path}, line {line}: {len(cells)} cells where the header has {len(header)} ({show_names(header)}): {remedy}"
            )
        yield {column: math.nan if cells[place].strip() in MISSING else cells[place] for column, place in places.items()}


def find_quotes(path: Path, form: Form) -> Form:
    """The form of a TSV file. Excel and pandas put double quotes around some cells, others write them as text: never both.

    They are text if one does not stand around a cell, is not doubled inside one, or does not close in its line.
    """
    with open_text(path, form, newline="") as file:
        quoted = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, start=1) if '"' in line)
        first = next((number for number, line in quoted if not _QUOTED_LINE.fullmatch(line)), 0)
    return form._replace(delimiter="\t", text_quote=first)


def read_header(path: Path, form: Form) -> list[str]:
    """The column names of a delimited file."""
    return next(_read_records(path, form), (1, []))[1]


def suggest_delimiter(header: list[str], form: Form) -> str:
    """A sentence if the header is one cell that looks like several; else empty."""
    others = [other for other in ",;\t|" if other != form.delimiter and len(header) == 1 and other in header[0]]
    if not others:
        return ""
    shown = r"\t" if others[0] == "\t" else others[0]
    return f"; its header has {_name(others[0])} between names: set data.csv_delimiter '{shown}'"


def _read_records(path: Path, form: Form) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each record. The header comes first, its names stripped; blank lines are left out.
    In a file with one column, only a line without any character is blank: `""` is a record.
    Text after a closing quote is refused, and so is a quote that never closes and would swallow the rest of the file.
    """
    csv.field_size_limit(_LARGEST_CELL_CHARS)
    first_line, width = 1, 0
    with open_text(path, form, newline="") as file:  # leaves line breaks in quotes to csv
        reader = csv.reader(file, strict=True, delimiter=form.delimiter, quoting=csv.QUOTE_NONE if form.text_quote else 0)
        try:
            for cells in reader:
                if len(cells) > 1 or (cells and (width == 1 or cells[0].strip())):
                    yield first_line, cells if width else [cell.strip() for cell in cells]
                    width = width or len(cells)
                first_line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{path}: the row that starts on line {first_line} is not valid CSV ({error}): put double quotes around cells "
                f"that hold {_name(form.delimiter)} or quotes, and double the quotes inside"
            ) from None


def _name(delimiter: str) -> str:
    return {",": "commas", ";": "semicolons", "\t": "tabs"}.get(delimiter, repr(delimiter))


def read_txt(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the paragraphs of a plain text, which blank lines separate. Line breaks inside become `\\n`."""
    with open_text(path, form) as file:
        for is_blank, lines in groupby(file, key=str.isspace):
            if not is_blank:
                yield dict.fromkeys(columns, "".join(lines).removesuffix("\n"))


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
