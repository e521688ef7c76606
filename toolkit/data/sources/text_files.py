"""Readers of CSV, TSV and plain text, also gzipped, in any encoding; one row in memory at a time."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from toolkit.errors import UserError

Cells = dict[str, Any]
"""One row's values of the requested columns, unchecked."""

GZIP_MAGIC = b"\x1f\x8b"
# The csv module's default limit of 131,072 characters per cell is too low for real articles. This one fits a 32-bit C long.
_LARGEST_CELL_CHARS = 2**31 - 1
_BYTES_PER_READ = 1 << 20
MISSING = frozenset(("NaN", "nan", "N/A", "n/a", "None", "NULL", "null"))
"""Cells of CSV and TSV files that are read as NaN, as pandas and R write empty ones."""
_EDGES = rb"[,;|\t\n\r\"]"
_MISSING_ENDS = {name.encode(): re.compile(name.encode() + rb"[ \t]*" + _EDGES) for name in sorted(MISSING)}
_MISSING_BEGIN = re.compile(_EDGES + rb"[ \t]*\Z")


class Form(NamedTuple):
    """How text files are written, beyond their kind."""

    encoding: str = "utf-8"
    delimiter: str = ","
    """Between the cells of CSV files."""

    def identify(self, kind: str) -> str:
        """What a fingerprint has of it: nothing for UTF-8 and commas."""
        delimiter = self.delimiter if kind == "csv" else ","
        return "" if (self.encoding, delimiter) == Form() else f" {self.encoding} {delimiter}"


def build_form(delimiter: str | None, encoding: str | None) -> Form:
    """The form that `data.csv_delimiter` and `data.encoding` name.

    Raises:
        UserError: a delimiter that is not one character, an encoding that Python does not know.
    """
    form = Form()
    if delimiter is not None:
        form = form._replace(delimiter="\t" if delimiter == r"\t" else delimiter)
        if len(form.delimiter) != 1 or form.delimiter in '"\r\n\0':
            raise UserError(f"data.csv_delimiter is {delimiter!r}: give one character, as in ';' or '|', or \\t for a tab")
    if encoding is not None:
        try:
            "".encode(encoding)  # fails for codecs that are not of text, too
            if encoding in ("idna", "punycode"):  # for the names of machines
                raise LookupError
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
    encoding = "utf-8-sig" if form.encoding == "utf-8" else form.encoding
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, newline=newline)


def read_csv(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of a delimited file with a header, row by row. A cell is text, or NaN if it is `MISSING`.

    Raises:
        UserError: a row with too many or too few cells, broken quoting; names the line.
    """
    records = _read_records(path, form)
    _, header = next(records, (1, []))
    places = {column: header.index(column) for column in columns}
    for line, cells in records:
        if len(cells) != len(header):
            raise UserError(
                f"{path}, line {line}: {len(cells)} cells where the header has {len(header)} ({', '.join(header)}): "
                f"put double quotes around cells that hold {_name(form.delimiter)}"
            )
        yield {column: math.nan if cells[place].strip() in MISSING else cells[place] for column, place in places.items()}


def read_tsv(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """As `read_csv`, with tabs between cells."""
    return read_csv(path, columns, form._replace(delimiter="\t"))


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


def has_missing_cells(path: Path) -> bool:
    """Whether a delimited file may have `MISSING` cells: part of its fingerprint, because such cells were text once."""
    end = b"\n"
    with open_bytes(path) as file:
        while True:
            block = file.read(_BYTES_PER_READ)
            text = end + (block or b"\n")
            found = (found.start() for name, end_of in _MISSING_ENDS.items() if name in text for found in end_of.finditer(text))
            if any(_MISSING_BEGIN.search(text[max(0, place - 8) : place]) for place in found):
                return True
            if not block:
                return False
            end = text[-16:]


def _read_records(path: Path, form: Form) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each record. The header comes first, its names stripped; blank lines are left out.

    Text after a closing quote is refused, and so is a quote that never closes and would swallow the rest of the file.

    Raises:
        UserError: broken quoting; names the line where the record starts.
    """
    csv.field_size_limit(_LARGEST_CELL_CHARS)
    first_line, is_header = 1, True
    with open_text(path, form, newline="") as file:  # leaves line breaks in quotes to csv
        reader = csv.reader(file, strict=True, delimiter=form.delimiter)
        try:
            for cells in reader:
                if len(cells) > 1 or any(map(str.strip, cells)):
                    yield first_line, [cell.strip() for cell in cells] if is_header else cells
                    is_header = False
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
    paragraph: list[str] = []
    with open_text(path, form) as file:
        for line in file:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield dict.fromkeys(columns, "".join(paragraph).removesuffix("\n"))
                paragraph = []
    if paragraph:
        yield dict.fromkeys(columns, "".join(paragraph).removesuffix("\n"))
