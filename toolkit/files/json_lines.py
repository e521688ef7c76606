"""JSON lines: one JSON value a line, in UTF-8. Every file of them is read and written here, a user's data as our own records.

`str.splitlines()` also splits at U+0085, U+2028 and U+2029, which JSON strings may hold as they are. So lines are split as bytes,
and these three are written as escapes, which keeps our files whole for readers that do split there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files.durable import written_beside

# Half a surrogate pair is legal in JSON only as an escape: UTF-8 has no bytes for it.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def read_json_lines(
    path: Path, *, way_out: str = "mend or remove the line", skip_torn_end: bool = False
) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of each line that is not blank, one line in memory at a time.

    Args:
        way_out: how to mend a broken line, for the message.
        skip_torn_end: leave out a last line without its line break, or one that is not JSON, as a crash leaves it.

    Raises:
        UserError: another line is not JSON or not UTF-8; names the file and the line.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        # bytes.splitlines() knows \n, \r\n and \r only; none of them stands inside a JSON string.
        lines = (line for part in file for line in part.splitlines(keepends=True))
        for number, line in enumerate(lines, start=1):
            if skip_torn_end and not line.endswith((b"\n", b"\r")):
                return
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if not text.strip():
                    continue
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                if skip_torn_end and next(lines, None) is None:
                    return
                reason = str(error).replace("line 1 column", "column")
                raise UserError(f"{path}, line {number}: not JSON ({reason}): {way_out}") from None
            yield number, value


def load_json_lines(path: Path, *, skip_torn_end: bool = False) -> list[Any]:
    """The values of `read_json_lines`, which has the arguments and errors."""
    return [value for _, value in read_json_lines(path, skip_torn_end=skip_torn_end)]


def encode_json_line(value: Any) -> bytes:
    """One line, its line break included; text in any script stays readable.

    Raises:
        ValueError: a float that JSON does not know (NaN, infinity).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def save_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a file of these lines, in place of what stands there.

    Raises:
        OSError: the file cannot be written; then what stood there stands.
    """
    with written_beside(path) as beside:
        beside.write_bytes(b"".join(map(encode_json_line, values)))
