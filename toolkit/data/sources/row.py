"""Rows as sources give them: not checked yet, not split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.errors import UserError


class Row(NamedTuple):
    """One row as its reader found it; nothing is checked yet."""

    source: Any
    target: Any
    group: str | None = None
    """Rows of one group stay on one side of the split; None: rows with the same source text are a group."""
    held_out: bool | None = None
    """True: evaluation, False: training, None: a hash of the group decides."""
    lead_text: str | None = None
    """Text whose first sentence is the lead baseline; None: the source."""
    content: str | None = None
    """What two rows have in common that are the same; None: source and target."""
    skip_reason: str | None = None
    """Set where the reader itself finds the row unusable, as in "with too few cells"."""


@dataclass(frozen=True, kw_only=True)
class RowInput:
    """One file, or one source that is no file."""

    label: str
    """Its name in messages."""
    columns: tuple[str, str] | None
    """Names of the source and the target column in messages; None: the reader has checked its cells itself."""
    digest: str
    """Hex sha256 of its contents."""
    read: Callable[[], Iterator[Row]]
    """Reads it from the start. Yields unusable rows too, so that every row has its position."""
    is_eval_file: bool = False
    """All its rows are evaluation rows."""
    mix_entry: int = 0
    """Inputs of one entry of a mix share `num_rows`."""


def check_text(value: Any, where: str) -> None:
    """A cell must hold text that every tokenizer and file format takes.

    Raises:
        UserError: another type, a NUL character, half a surrogate pair; beginning with `where`.
    """
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
