"""Files with rows: which paths are meant, what kind each is, and checks of entire files.

A broken file is an error that names the line or row, before training starts. Empty rows are yielded; the caller counts and
skips them. The readers of `datasets` would lose, move or retype cells without a word (docs/decisions.md).
"""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import hashlib
import io
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from toolkit.data.sources.columnar import list_names, read_columnar
from toolkit.data.sources.json_files import list_keys, read_json
from toolkit.data.sources.row import show_names
from toolkit.data.sources.text_files import Cells, Form, open_bytes, read_csv, read_header, read_txt
from toolkit.errors import UserError
from toolkit.files.durable import refuse_pointers

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
        with suppress(UnicodeDecodeError), io.TextIOWrapper(open_bytes(path), "utf-8") as file:  # with its byte order mark
            if sum(not line.isascii() for line in file):
                trouble = f"{path} is valid UTF-8, but is read as {encoding}, with other letters"
                logger.warning(f"{trouble}: leave data.encoding out for UTF-8")
    return digest.hexdigest()


class FileKind(NamedTuple):
    """How a kind of file is read."""

    read: Callable[[Path, Sequence[str], Form], Iterator[Cells]]
    """Yields the cells of some columns, row by row."""
    list_columns: Callable[[Path, Form], list[str]]
    """From the header, the schema, or the keys of the first thousand objects."""
    is_text: bool = True


_DELIMITED, _JSON = FileKind(read_csv, read_header), FileKind(read_json, list_keys)
_COLUMNAR = FileKind(read_columnar, list_names, is_text=False)
READERS = {
    "csv": _DELIMITED,
    "tsv": _DELIMITED,
    "json": _JSON,
    "jsonl": _JSON,
    "parquet": _COLUMNAR,
    "arrow": _COLUMNAR,
    "txt": FileKind(read_txt, lambda path, form: ["text"]),
}
"""By the kind of file, which is a value of `data.source`."""
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
