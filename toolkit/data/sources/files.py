"""Files with rows: which paths are meant, what kind each is, checks of entire files, and the readers of parquet and Arrow files,
with one block in memory at a time.

A broken file is an error that names the line or row, before training starts. Empty rows are yielded; the caller counts and
skips them. The readers of `datasets` would lose, move or retype cells without a word (docs/decisions.md).
"""

import codecs
import contextlib
import difflib
import glob
import gzip
import hashlib
import io
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.sources.row import count_rows_at_once, list_parts, show_names
from toolkit.data.sources.text_files import Cells, Form, list_keys, open_bytes, read_csv, read_header, read_json, read_txt
from toolkit.errors import UserError, first_line
from toolkit.files.durable import refuse_pointers
from toolkit.files.json_lines import DECODER

logger = logging.getLogger("toolkit")

_BYTES_PER_READ = 1 << 20
_BINARY = (b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh91AY", b"PAR1", b"ARROW1")
"""First bytes of zip archives (Excel's workbooks, too), of zstd, xz and bzip2, of parquet and of Arrow files."""


def find_files(patterns: list[str] | str, setting: str) -> list[Path]:
    """The files that paths and glob patterns match, each once, in the order given; the matches of a pattern are sorted. A path or
    pattern without a file (the error suggests the nearest name), or a folder, is a `UserError`. `setting` is the config field's
    name, for messages."""
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern)
        try:
            path = path.expanduser()
            path.is_file()
        except (OSError, RuntimeError) as error:  # no such user, too long a name, a folder that may not be entered
            raise UserError(f"{setting}: {pattern!r:.200} cannot be read ({error}): check the path") from None
        if path.is_dir():
            or_source = ", or give it as source" if setting.endswith(".files") else ""
            raise UserError(f"{setting}: {pattern} is a folder: name the files in it, as in {path / '*'}{or_source}")
        if path.exists():
            found[path] = None
        elif glob.has_magic(pattern):
            matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
            if not matches:
                raise UserError(f"{setting}: no file matches {pattern}: check the pattern")
            found.update(dict.fromkeys(map(Path, matches)))
        else:
            hint = f"the folder {path.parent} does not exist"
            if path.parent.is_dir():
                names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
                near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
                hint = f"did you mean {path.parent / near[0]}?" if near else f"nothing in {path.parent} has a name like it"
            raise UserError(f"{setting}: there is no file {pattern}: {hint}")
    return list(found)


def hash_file(path: Path, *, is_text: bool, encoding: str = "utf-8") -> str:
    """Hex sha256 of a file's contents, of text uncompressed. The same pass checks that a text file is readable. UTF-8 that would
    be read as something else is a warning. A file that cannot be opened, is a git-lfs pointer or empty, or (for text) is
    compressed otherwise than by gzip, has another encoding or a NUL character, is a `UserError` with the line."""
    digest = hashlib.sha256()
    decoder, num_lines, begin = codecs.getincrementaldecoder(encoding)(), 0, b""
    try:
        refuse_pointers([path])
        with open_bytes(path) if is_text else path.open("rb") as file:
            while True:
                block = file.read(_BYTES_PER_READ)
                begin = begin or block[:8]
                digest.update(block)
                if is_text:
                    if begin.startswith(_BINARY):
                        kinds = "an archive, an Excel workbook, or a parquet or Arrow file"
                        remedy = "unpack it, save it as CSV, or leave data.source out, so that its ending says how it is read"
                        raise UserError(f"{path} is not text, but {kinds}: {remedy}")
                    text = decoder.decode(block, final=not block)
                    if "\0" in text:
                        line = num_lines + text[: text.index("\0")].count("\n") + 1
                        raise UserError(f"{path}, line {line}: a NUL byte: is this a text file, saved as UTF-8?")
                    num_lines += text.count("\n")
                if not block:
                    break
            if file.tell() == 0:
                raise UserError(f"{path} is empty: give a file with rows")
    except UnicodeError as error:
        remedy = "set data.encoding (cp1252 for files of Western Windows, utf-16, none for UTF-8), or convert the file"
        if not isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path} is not valid {encoding.upper()} ({error}): {remedy}") from None
        # The decoder may have kept the first bytes of a character from the previous block; they hold no line break.
        line = num_lines + error.object[: error.start].decode(encoding, "ignore").count("\n") + 1
        where = f"{path}, line {line}: byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{where} is not valid {encoding.upper()} ({error.reason}): {remedy}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file ({str(error).rstrip('.')}): copy or write it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    if is_text and encoding not in ("utf-8", "utf-8-sig"):
        with (
            contextlib.suppress(UnicodeDecodeError),
            io.TextIOWrapper(open_bytes(path), "utf-8") as file,
        ):  # with its byte order mark
            if sum(not line.isascii() for line in file):
                trouble = f"{path} is valid UTF-8, but is read as {encoding}, with other letters"
                logger.warning(f"{trouble}: leave data.encoding out for UTF-8")
    return digest.hexdigest()


def read_columnar(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of a parquet or Arrow file (Feather, the caches of `datasets`), row by row; a `UserError`
    for another kind of file, one that is truncated or damaged, or text that is not UTF-8, with the row."""
    with _open(path) as (schema, read):
        columns = outer_names(schema, columns)
        yield from read_batches(path, read(columns), columns)


def list_names(path: Path, form: Form) -> list[str]:
    """The column names of such a file, as `list_parts`; raises as `read_columnar`."""
    with _open(path) as (schema, _):
        return list_struct_fields(schema)


def outer_names(schema: Any, names: Sequence[str]) -> list[str]:
    """The columns of an Arrow schema in which named parts stand."""
    return [column for column in schema.names if any(f"{name}.".startswith(f"{column}.") for name in names)]


def list_struct_fields(schema: Any) -> list[str]:
    """`list_parts` of the rows of an Arrow schema."""
    import pyarrow as pa

    def as_row(fields: Any) -> dict[str, Any]:
        return {field.name: as_row(field.type) if pa.types.is_struct(field.type) else None for field in fields}

    return list_parts(as_row(schema))


def read_batches(where: object, batches: Iterable[Any], columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns of Arrow tables or record batches, row by row; see `read_columnar`."""
    number = 0
    try:
        for batch in batches:
            arrays = [batch[column] for column in columns]
            changes = [(column, _find_change(array.type)) for column, array in zip(columns, arrays, strict=True)]
            for cells in zip(*arrays, strict=True):
                number += 1
                values = ((key, change, cell.as_py()) for (key, change), cell in zip(changes, cells, strict=True))
                yield {key: change(value) if change else value for key, change, value in values}
    except UnicodeDecodeError as error:
        raise UserError(f"{where}, row {number}: text that is not valid UTF-8 ({error.reason}): write it as UTF-8") from None


def _find_change(kind: Any) -> Callable[[Any], Any] | None:
    """What turns Python values of an Arrow type into a row's, None if nothing need be done: structs lose their null keys, because
    Arrow gives each the keys of all; JSON text, as which `datasets` stores objects of mixed types, keeps them."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: None if text is None else DECODER.decode(text)
    if pa.types.is_struct(kind):
        changes = [(field.name, _find_change(field.type) or (lambda value: value)) for field in kind]
        return lambda value: value and {key: change(value[key]) for key, change in changes if value[key] is not None}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type") and (change := _find_change(kind.value_type)):
        return lambda items: items and [change(item) for item in items]
    return None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Callable[[list[str]], Iterable[Any]]]]:
    """The schema, and a function that reads batches with some columns at least; Arrow files are memory-mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        begin = file.read(6)
    try:
        if begin.startswith(b"PAR1"):
            with pq.ParquetFile(path) as parquet:
                about = parquet.metadata
                num_bytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
                size = count_rows_at_once(about.num_rows, num_bytes)
                yield parquet.schema_arrow, lambda columns: parquet.iter_batches(batch_size=size, columns=columns)
        elif begin == b"ARROW1":
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as arrow:
                yield arrow.schema, lambda _: map(arrow.get_batch, range(arrow.num_record_batches))
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                yield stream.schema, lambda _: stream
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a complete parquet or Arrow file ({first_line(error)}): copy or write it again") from None


_DELIMITED, _JSON, _COLUMNAR = (read_csv, read_header), (read_json, list_keys), (read_columnar, list_names)
COLUMNAR = ("parquet", "arrow")
"""Kinds of file that are not text."""
READERS: dict[str, tuple[Callable[[Path, Sequence[str], Form], Iterator[Cells]], Callable[[Path, Form], list[str]]]] = {
    "csv": _DELIMITED,
    "tsv": _DELIMITED,
    "json": _JSON,
    "jsonl": _JSON,
    "parquet": _COLUMNAR,
    "arrow": _COLUMNAR,
    "txt": (read_txt, lambda path, form: ["text"]),
}
"""By the kind of file, a value of `data.source`: what yields the cells of some columns, row by row; and what lists its columns,
from the header, the schema, or the keys of the first thousand objects."""
_ENDINGS = {"ndjson": "jsonl", "feather": "arrow"}


def find_kind(path: Path, setting: str) -> str:
    """The kind that a file's ending names, without `.gz`; a `UserError` for another ending."""
    kind = name_kind(path)
    if kind is None:
        known = ", ".join(f".{ending}" for ending in READERS)
        raise UserError(f"{setting}: {path} has an unknown file ending: let its name end in one of {known}, or in one with .gz")
    return kind


def name_kind(path: Path) -> str | None:
    """As `find_kind`; None for another ending."""
    ending = Path(path.name.lower().removesuffix(".gz")).suffix.lstrip(".")
    kind = _ENDINGS.get(ending, ending)
    return kind if kind in READERS else None


def check_columns(
    where: object,
    existing: Sequence[str],
    wanted: Sequence[str],
    remedy: str = "set data.source_column and data.target_column to columns that exist",
) -> None:
    """Check that every wanted column exists exactly once; a `UserError` names the one at fault and those that exist."""
    for column in wanted:
        if (count := existing.count(column)) != 1:
            found = f"column {column!r} (its columns: {show_names(existing) or 'none'})"
            raise UserError(
                f"{where} has more than one {found}: keep one of them" if count else f"{where} has no {found}: {remedy}"
            )
