"""The rows to generate for: from the command line, a file or standard input, read as rows to train on, without their answers."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.data.rows.columns import Columns, with_optional
from toolkit.data.rows.example import Example
from toolkit.data.rows.inputs import RowInput, open_file, read_rows
from toolkit.data.sources.files import READERS, check_columns, find_kind, hash_file
from toolkit.data.sources.text_files import Form, build_form
from toolkit.errors import UserError
from toolkit.export.usage import Usage

_READINGS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
"""The reading of a row without its answer by the name of its column; other columns have a text or a chat."""
_COLUMNS = (*_READINGS, "source", "article", "document", "prompt", "text")
"""Columns to generate for, unless one is named."""

_NOT_TEXT = re.compile("[\udc80-\udcff]")
"""Bytes that `surrogateescape` has kept."""

Row = tuple[str, Example]
"""Where it stands, for messages, and a prompt or a chat."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    model: str
    file: str | None
    texts: list[str]
    column: str | None
    csv_delimiter: str | None = None
    encoding: str | None = None
    plain: bool
    output: Path | None
    batch_size_rows: int | None
    dtype: str | None
    settings: dict[str, Any]
    """Of generation, that replace the model's own: `max_new_tokens`, `num_beams`."""


class Rows(NamedTuple):
    """The rows of an input, read one by one."""

    read: Callable[[], Iterator[Row]]
    num_rows: int | None
    """None: standard input, which is read once."""
    how: str
    """A sentence on how they are read."""


def open_rows(options: Options, usage: Usage, *, has_chat_template: bool = False) -> Rows:
    """Check and count all rows of `--file` or `--text`; those of standard input are checked when they are read. No such file,
    column or text is a `UserError`, with file and row.

    Args:
        usage: how the run read its files. A file in UTF-8 is read as such without `--encoding`, and standard input is UTF-8.
        has_chat_template: whether Alpaca's rows become chats.
    """
    form = build_form(options.csv_delimiter or usage.csv_delimiter, options.encoding)
    if options.file in (None, "-"):
        for name, given in (("--column", options.column), ("--csv-delimiter", options.csv_delimiter)):
            if given is not None:
                raise UserError(f"{name} is {given!r}, but there is no --file with columns: leave it out")
        label, columns = "standard input" if options.file else "--text", Columns("prompt", ("text",))
        texts = _read_lines(form.encoding) if options.file else options.texts
        read_texts = partial(map, lambda text: {"text": text}, texts)
        item = RowInput(label=label, source="txt", read=read_texts, columns=columns, digest="", for_generation=True)
    else:
        item = _open_file(options, usage, form, has_chat_template)

    def read() -> Iterator[Row]:
        for number, row in enumerate(read_rows(item), start=1):
            where = f"{item.label}, row {number}"
            if isinstance(row, str):
                raise UserError(f"{where} is a row {row}, which has nothing to generate for: correct or remove it")
            yield where, row

    if options.file == "-":
        return Rows(read, None, "")
    num_rows = sum(1 for _ in read())
    if not num_rows:
        raise UserError(f"--file {item.label} has no rows: give a file with rows")
    return Rows(read, num_rows, item.reading and f"{item.label}: {num_rows:,} rows, read as {item.reading}")


def _open_file(options: Options, usage: Usage, form: Form, has_chat_template: bool) -> RowInput:
    path = Path(str(options.file))
    if not path.is_file():
        raise UserError(f"--file {path} does not exist, or is not a file: check the path")
    kind, how = find_kind(path, "--file"), ""
    saved = build_form(None, usage.encoding).encoding
    if options.encoding is None and saved != "utf-8" and READERS[kind].is_text:
        try:
            hash_file(path, is_text=True)
            how = ", read as utf-8"
        except UserError:
            form = form._replace(encoding=saved)
    choose = partial(_choose_column, wanted=options.column, saved=usage.source_column, has_chat_template=has_chat_template)
    item = open_file(path, kind, choose, form, for_generation=True)
    return replace(item, reading=f"{item.reading}{how}")


def _choose_column(
    where: object, existing: Sequence[str], wanted: str | None, saved: str | None, *, has_chat_template: bool
) -> Columns:
    """The column `wanted` by the user, else that `saved` by the run, else one of `_COLUMNS`, else the only one."""
    named = wanted or (saved if saved in existing else None)
    names = [named] if named else [name for name in _COLUMNS if name in existing] or list(existing)
    if len(names) != 1 or (not named and set(",;\t|").intersection(names[0])):  # several names in one cell
        raise UserError(f"{where} has the columns {', '.join(names)}: name the one to generate for as --column")
    check_columns(where, existing, names, way_out="correct --column")
    return with_optional(_READINGS.get(names[0], "prompt"), (names[0],), existing, has_chat_template=has_chat_template)


def _read_lines(encoding: str) -> Iterator[str]:
    """The lines of standard input."""
    try:
        for number, line in enumerate(io.TextIOWrapper(sys.stdin.buffer, encoding, errors="surrogateescape"), start=1):
            if found := _NOT_TEXT.search(line):
                byte = f"byte 0x{ord(found[0]) - 0xDC00:02x} is not valid {encoding.upper()}"
                raise UserError(f"standard input, row {number}: {byte}: give --encoding, or convert it")
            line = line.removeprefix("\ufeff") if number == 1 else line  # a byte order mark
            yield line.removesuffix("\n")
    except UnicodeError as error:
        raise UserError(f"standard input is not valid {encoding.upper()} ({error}): give --encoding, or convert it") from None
