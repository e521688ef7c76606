"""Readers of csv, jsonl and parquet files, and checks of entire files.

A broken file is an error that names the line or row, before training starts. Empty rows are yielded; the caller counts and
skips them. The readers of `datasets` would lose, move or retype cells without a word (docs/decisions.md).
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files.json_lines import read_json_lines

Cells = dict[str, Any]
"""One row's values of the requested columns, unchecked."""

_BYTES_PER_READ = 1 << 20
# The csv module's default limit of 131,072 characters per cell is too low for real articles. This one fits a 32-bit C long.
_LARGEST_CELL_CHARS = 2**31 - 1
_LINES_TO_FIND_KEYS_IN = 1000


def find_files(patterns: list[str] | str, setting: str) -> list[Path]:
    """The files that paths and glob patterns match, each once, in the order given; the matches of a pattern are sorted.

    Args:
        setting: name of the config field, for messages.

    Raises:
        UserError: a path or pattern without a file (the error suggests the nearest name), or a folder.
    """
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"{setting}: {pattern} is a folder: name the files in it, as in {path / '*'}")
        if path.exists():
            found[path] = None
        elif glob.has_magic(pattern):
            matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
            if not matches:
                raise UserError(f"{setting}: no file matches {pattern}: check the pattern")
            found.update(dict.fromkeys(map(Path, matches)))
        else:
            raise UserError(f"{setting}: there is no file {pattern}{_nearest_name(path)}")
    return list(found)


def hash_file(path: Path, *, is_text: bool) -> str:
    """Hex sha256 of a file's contents. The same pass checks that a text file is readable.

    Raises:
        UserError: the file cannot be opened or is empty, or (for text) is not UTF-8 or has a NUL byte; names the line.
    """
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_lines = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_BYTES_PER_READ)
                digest.update(block)
                if is_text:
                    decoder.decode(block, final=not block)
                    if b"\0" in block:
                        line = num_lines + block[: block.index(b"\0")].count(b"\n") + 1
                        raise UserError(f"{path}, line {line}: a NUL byte: is this a text file, saved as UTF-8?")
                    num_lines += block.count(b"\n")
                if not block:
                    break
            if file.tell() == 0:
                raise UserError(f"{path} is empty: give a file with rows")
    except UnicodeDecodeError as error:
        # The decoder may have kept the first bytes of a character from the previous block; they hold no line break.
        line = num_lines + error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise UserError(f"{path}, line {line}: byte 0x{byte:02x} is not valid UTF-8 ({error.reason}): convert the file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    return digest.hexdigest()


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns of a comma-separated file with a header, row by row. Every cell is text.

    Raises:
        UserError: a row with too many or too few cells, broken quoting; names the line.
    """
    records = _read_records(path)
    _, header = next(records, (1, []))
    places = {column: header.index(column) for column in columns}
    for line, cells in records:
        if len(cells) != len(header):
            raise UserError(
                f"{path}, line {line}: {len(cells)} cells where the header has {len(header)} ({', '.join(header)}): "
                "put double quotes around cells that hold commas"
            )
        yield {column: cells[place] for column, place in places.items()}


def _read_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each record. The header comes first, its names stripped; blank lines are left out.

    Text after a closing quote is refused, and so is a quote that never closes and would swallow the rest of the file.

    Raises:
        UserError: broken quoting; names the line where the record starts.
    """
    csv.field_size_limit(_LARGEST_CELL_CHARS)
    first_line, is_header = 1, True
    # utf-8-sig drops a byte order mark; newline="" leaves line breaks in quotes to csv.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for cells in reader:
                if len(cells) > 1 or any(map(str.strip, cells)):
                    yield first_line, [cell.strip() for cell in cells] if is_header else cells
                    is_header = False
                first_line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{path}: the row that starts on line {first_line} is not valid CSV ({error}): put double quotes around cells "
                "that hold commas or quotes, and double the quotes inside"
            ) from None


def read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the values of some keys from a file with one JSON object per line; None for a missing key.

    Raises:
        UserError: a line that is not JSON or not an object.
    """
    for row in _read_objects(path, example_key=columns[0]):
        yield {column: row.get(column) for column in columns}


def _read_objects(path: Path, *, example_key: str) -> Iterator[dict[str, Any]]:
    for line, row in read_json_lines(path, way_out="write one object a line"):
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {line}: a JSON {_json_type(row)}, not an object: write {{{example_key!r}: ...}}")
        yield row


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns of a parquet file, row by row, with one block in memory at a time.

    Raises:
        UserError: not parquet, truncated or damaged; text that is not UTF-8, with the row.
    """
    import pyarrow.parquet as pq

    number = 0
    try:
        with _parquet_errors(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000, columns=list(columns)):
                for cells in zip(*(batch[column] for column in columns), strict=True):
                    number += 1
                    yield {column: cell.as_py() for column, cell in zip(columns, cells, strict=True)}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number}: text that is not valid UTF-8 ({error.reason}): write it as UTF-8") from None


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Cells]]] = {
    "csv": read_csv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


def list_columns(path: Path, kind: str) -> list[str]:
    """A file's column names: from the header, the schema, or the keys of the first thousand objects.

    Args:
        kind: one of `READERS`.

    Raises:
        UserError: the file cannot be read as this kind.
    """
    if kind == "csv":
        return next(_read_records(path), (1, []))[1]
    if kind == "jsonl":
        objects = islice(_read_objects(path, example_key="text"), _LINES_TO_FIND_KEYS_IN)
        return list({key: None for row in objects for key in row})
    import pyarrow.parquet as pq

    with _parquet_errors(path), pq.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path} is not a complete parquet file ({reason.rstrip('.')}): copy or write it again") from None


def check_columns(
    where: object,
    existing: Sequence[str],
    wanted: Sequence[str],
    way_out: str = "set data.source_column and data.target_column to columns that exist",
) -> None:
    """Check that every wanted column exists exactly once.

    Raises:
        UserError: names the column at fault and those that exist.
    """
    for column in wanted:
        if existing.count(column) != 1:
            trouble = f"no column {column!r}" if column not in existing else f"more than one column {column!r}"
            raise UserError(f"{where} has {trouble} (its columns: {', '.join(existing) or 'none'}): {way_out}")


def _nearest_name(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f": did you mean {path.parent / near[0]}?" if near else f": nothing in {path.parent} has a name like it"


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
