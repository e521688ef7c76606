"""JSON lines: one JSON value per line, in UTF-8. All JSONL files are read and written here, users' data and our own records.

`str.splitlines()` also splits at U+0085, U+2028 and U+2029, which JSON strings may contain unescaped. So lines are split as
bytes, and these three characters are written as escapes, for readers that do split there.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files.durable import written_beside

# JSON allows half a surrogate pair only as an escape: UTF-8 cannot encode it.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key!r:.60} stands twice in one object: keep one of them")
    return built


DECODER = json.JSONDecoder(object_pairs_hook=_build_object)
"""Python's own would take the last value of a repeated key without a word. This one raises a `ValueError`."""


def read_json_lines(
    path: Path,
    *,
    lines: Iterable[bytes] | None = None,
    remedy: str = "correct or remove the line",
    skip_torn_end: bool = False,
) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of each line that is not blank, with one line in memory at a time. Another line that is not
    JSON or not UTF-8 is a `UserError` with file and line; a file that cannot be read, an `OSError`.

    Args:
        lines: the file's lines, if it is not read as it is.
        remedy: how to fix a broken line, for the message.
        skip_torn_end: skip a last line that a crash has torn: it has no line break, or is not JSON.
    """
    with path.open("rb") if lines is None else nullcontext(lines) as file:
        # bytes.splitlines() splits at \n, \r\n and \r only; a JSON string contains none of them.
        parts = (line for part in file for line in part.splitlines(keepends=True))
        for number, line in enumerate(parts, start=1):
            if skip_torn_end and not line.endswith((b"\n", b"\r")):
                return
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if not text.strip():
                    continue
                value = DECODER.decode(text)
            except (ValueError, RecursionError) as error:
                if skip_torn_end and next(parts, None) is None:
                    return
                reason = str(error).replace("line 1 column", "column")
                raise UserError(f"{path}, line {number}: not JSON ({reason}): {remedy}") from None
            yield number, value


def load_json_lines(path: Path, *, skip_torn_end: bool = False) -> list[Any]:
    """The values of `read_json_lines`, as a list; arguments and errors are described there."""
    return [value for _, value in read_json_lines(path, skip_torn_end=skip_torn_end)]


def encode_json_line(value: Any) -> bytes:
    """One line with its line break. Text in any script stays readable; NaN and infinity, which JSON lacks, are a
    `ValueError`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def save_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write `values` as lines, replacing an existing file, which stays if an `OSError` is raised."""
    with written_beside(path) as beside:
        beside.write_bytes(b"".join(map(encode_json_line, values)))
