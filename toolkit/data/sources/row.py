"""What every cell of a row must be."""

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.errors import UserError


def show_names(names: Iterable[str]) -> str:
    """Names of columns in a row, for messages; those that are blank or cannot be printed as they are as Python literals."""
    return ", ".join(name if name.isprintable() and name.strip() else repr(name) for name in names)


def list_parts(row: Mapping[str, Any], before: str = "") -> list[str]:
    """The columns of a row, each followed by those inside it where it is an object, as in `translation.en`."""
    parts = []
    for name, value in row.items():
        parts += [f"{before}{name}", *(list_parts(value, f"{before}{name}.") if isinstance(value, Mapping) else ())]
    return parts


def take_part(row: Mapping[str, Any], name: str) -> Any:
    """What stands inside a column, by a name of `list_parts`; None where it is missing."""
    if name in row:
        return row[name]
    # A name may have dots of its own.
    inside = ((value, name.removeprefix(f"{key}.")) for key, value in row.items() if name.startswith(f"{key}."))
    found = (take_part(value, rest) for value, rest in inside if isinstance(value, Mapping))
    return next((part for part in found if part is not None), None)


def check_text(value: Any, where: str) -> None:
    """Refuse a cell that not every tokenizer and file format takes as text, by a `UserError` that begins with `where`."""
    if not isinstance(value, str):
        raise UserError(f"{where}: {value!r:.60} is of type {type(value).__name__}, not text: write it as a string")
    if "\0" in value:
        raise UserError(f"{where}: the text holds a NUL character: remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start + 1} is half a surrogate pair, which is no text: write the whole character"
        ) from None


def is_nan(value: Any) -> bool:
    """Whether a cell is NaN, as pandas makes of an empty one, and our reader of CSV of `NA`, `NaN`, `None` and the like."""
    return isinstance(value, float) and value != value


def read_optional_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """A cell that may be missing, blank or NaN: then it is empty."""
    value = row.get(column)
    if value is None or is_nan(value):
        return ""
    check_text(value, f"{where}, column {column}")
    return value if value.strip() else ""


def count_rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Rows of a block in memory: a thousand, or as many of this average size as 16 MiB hold."""
    return max(1, min(1000, 2**24 * num_rows // max(1, num_bytes)))
