"""Readers of CSV, TSV and plain text, also gzipped, in any encoding; one row in memory at a time."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from toolkit.data.sources.row import show_names
from toolkit.errors import UserError

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
