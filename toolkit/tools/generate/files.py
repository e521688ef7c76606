"""The files of `generate`: the rows to generate for, of a file, standard input or the command line, read as rows to train on,
without their answers; and the file of their texts, which only grows, and which the same command continues.

out.jsonl              the texts: lines of `row` (from 1) and `prediction`
out.jsonl.unfinished   until all are there: a hash of what they are generated with, then of the rows up to each write
out.jsonl.lock         held by the process that writes them
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.data.rows.columns import Columns, with_optional
from toolkit.data.rows.example import Example
from toolkit.data.rows.inputs import RowInput, open_file, read_rows
from toolkit.data.sources.files import COLUMNAR, check_columns, find_kind, hash_file
from toolkit.data.sources.text_files import build_form
from toolkit.errors import UserError, escape_controls, refusal_named
from toolkit.export.usage import Usage
from toolkit.files.durable import fsync_path, written_beside
from toolkit.files.json_lines import encode_json_line, read_json_lines
from toolkit.files.lock import release_lock, take_lock
from toolkit.launch.rank_consistency import describe_files
from toolkit.models.lora_files import CONFIG_FILE
from toolkit.tools.generate.model import find_folder, read_base_name

_READINGS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
"""The reading of a row without its answer by the name of its column; other columns have a text or a chat."""
_COLUMNS = (*_READINGS, "source", "article", "document", "prompt", "text")
"""Columns to generate for, unless one is named."""

_NOT_TEXT = re.compile("[\udc80-\udcff]")
"""Bytes that `surrogateescape` has kept."""
UNFINISHED, LOCK = ".unfinished", ".lock"

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


def open_rows(options: Options, usage: Usage, *, has_chat_template: bool = False) -> tuple[RowInput, int | None]:
    """The input of the rows, and their number. Those of `--file` or `--text` are checked and counted; those of standard input are
    checked when they are read, once. No such file, column or text is a `UserError`, with file and row.

    `usage` says how the run read its files; without `--encoding` a file in UTF-8 is read as such, and standard input is UTF-8.
    Alpaca's rows become chats if the tokenizer `has_chat_template`.
    """
    encoding = build_form(None, options.encoding).encoding
    if options.file not in (None, "-"):
        item = _open_file(options, usage, has_chat_template)
    else:
        for name, given in (("--column", options.column), ("--csv-delimiter", options.csv_delimiter)):
            if given is not None:
                raise UserError(f"{name} is {given!r}, but there is no --file with columns: leave it out")
        label, columns = "standard input" if options.file else "--text", Columns("prompt", ("text",))
        texts = _read_lines(encoding) if options.file else options.texts
        read_texts = partial(map, lambda text: {"text": text}, texts)
        item = RowInput(label=label, source="txt", read=read_texts, columns=columns, digest="", for_generation=True)
    if options.file == "-":
        return item, None
    num_rows = sum(1 for _ in read_prompts(item))
    if not num_rows:
        raise UserError(f"--file {item.label} has no rows: give a file with rows")
    return item, num_rows


def read_prompts(item: RowInput) -> Iterator[Row]:
    """The rows of an input; a `UserError` for one that training would leave out."""
    for number, row in enumerate(read_rows(item), start=1):
        where = f"{item.label}, row {number}"
        if isinstance(row, str):
            raise UserError(f"{where} is a row {row}, which has nothing to generate for: correct or remove it")
        yield where, row


def _open_file(options: Options, usage: Usage, has_chat_template: bool) -> RowInput:
    path = Path(str(options.file))
    kind, how = find_kind(path, "--file"), ""
    form = build_form(options.csv_delimiter or usage.csv_delimiter, options.encoding)
    saved = build_form(None, usage.encoding).encoding
    if options.encoding is None and saved != "utf-8" and kind not in COLUMNAR:
        try:
            hash_file(path, is_text=True)
            how = ", read as utf-8"
        except UserError:
            form = form._replace(encoding=saved)

    def choose(where: object, existing: Sequence[str]) -> Columns:
        """The column that the user names, else that of the run, else one of `_COLUMNS`, else the only one."""
        named = options.column or (usage.source_column if usage.source_column in existing else None)
        names = [named] if named else [name for name in _COLUMNS if name in existing] or list(existing)
        if len(names) != 1 or (not named and set(",;\t|").intersection(names[0])):  # several names in one cell
            raise UserError(f"{where} has the columns {', '.join(names)}: name the one to generate for as --column")
        check_columns(where, existing, names, remedy="correct --column")
        return with_optional(_READINGS.get(names[0], "prompt"), (names[0],), existing, has_chat_template=has_chat_template)

    item = open_file(path, kind, choose, form, for_generation=True)
    return replace(item, reading=f"{item.reading}{how}")


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


def begin_output(options: Options) -> int:
    """Lock the output; returns the number of texts that an earlier, unfinished call has written. A torn last line is removed. An
    output that another process writes, that is not an unfinished one of this call, or cannot be written, is a `UserError`."""
    output = options.output
    assert output is not None
    about, lock = _beside(output, UNFINISHED), _beside(output, LOCK)
    settings = {**dataclasses.asdict(options), "output": None, "batch_size_rows": None, "file": None}
    try:
        take_lock(lock, f"another process is writing --output {output}: wait for its end, or name another file")
        # What decides the texts beside the rows: settings, and the files of the model and, for an adapter, of its base.
        folder = Path(find_folder(options.model))
        folders = [folder, Path(read_base_name(folder))] if (folder / CONFIG_FILE).is_file() else [folder]
        decides = json.dumps([settings, [*map(describe_files, folders)]], default=str)
        mine = hashlib.sha256(decides.encode()).hexdigest()
        if output.exists():
            if not about.exists() or about.read_text(encoding="utf-8").partition("\n")[0] != mine:
                raise UserError(f"--output {output} exists, and is not what this command left unfinished: name another file")
            return _num_written(output)
        with written_beside(about) as beside:
            beside.write_text(f"{mine}\n", encoding="utf-8")
        output.touch()
        fsync_path(output.absolute().parent)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): name a file that you can write") from None
    except UserError:
        release_lock(lock, remove=True)
        raise
    return 0


def append_texts(output: Path | None, first: int, texts: list[str], digest: str) -> None:
    """Write the texts of rows `first` (from 0) and on, and the digest of all rows up to the last of these texts. They are on the
    disk when this returns. Without an output, print the texts."""
    if output is None:
        for text in texts:
            print(escape_controls(text), flush=True)
        return
    lines = [{"row": number, "prediction": text} for number, text in enumerate(texts, start=first + 1)]
    with refusal_named(f"--output {output} cannot be written", "make room, and give the same command again"):
        with output.open("r+b") as file:  # not made again, without its first lines, if it was removed
            file.seek(0, os.SEEK_END)
            file.write(b"".join(map(encode_json_line, lines)))
            file.flush()
            os.fsync(file.fileno())
        with _beside(output, UNFINISHED).open("a", encoding="utf-8") as about:
            about.write(f"{first + len(texts)} {digest}\n")


def read_notes(output: Path) -> dict[int, str]:
    """The digests of rows that texts were written for, by their number; a torn line is left out."""
    notes = re.findall(r"^(\d+) ([0-9a-f]{64})$", _beside(output, UNFINISHED).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {int(num_rows): digest for num_rows, digest in notes}


def end_output(output: Path) -> None:
    """All texts are written: nothing continues the output any more."""
    _beside(output, UNFINISHED).unlink(missing_ok=True)
    release_lock(_beside(output, LOCK), remove=True)


def _num_written(output: Path) -> int:
    with output.open("r+b") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))  # only the last line can lack its end
    num, remedy = 0, "remove this line and all after it, and give the same command again"
    for line, value in read_json_lines(output, remedy=remedy):
        num += 1
        if not isinstance(value, dict) or value.get("row") != num:
            raise UserError(f"{output}, line {line}: not row {num}: {remedy}")
    return num


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(output.name + ending)
