"""The interface between a source and the pass over its rows: rows as read, not yet checked or split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.errors import UserError


class Row(NamedTuple):
    """One row as read from its source; nothing is checked yet."""

    source: Any
    target: Any
    group: str | None = None
    """Rows of one group go into the same split; None: rows with the same source text form a group."""
    held_out: bool | None = None
    """True: evaluation, False: training, None: a hash of the group decides."""
    lead_text: str | None = None
    """Text whose first sentence is the lead baseline; None: the source."""
    content: str | None = None
    """Two rows with equal content are duplicates; None: source and target are compared."""
    skip_reason: str | None = None
    """Why the reader finds the row unusable, as in "with too few cells"; None if it does not."""


@dataclass(frozen=True, kw_only=True)
class RowInput:
    """One file, or one source that is not a file."""

    label: str
    """Its name in messages."""
    columns: tuple[str, str] | None
    """Names of the source and the target column, for messages; None: the reader checks its cells itself."""
    digest: str
    """Hex sha256 of its contents."""
    read: Callable[[], Iterator[Row]]
    """Reads the input from the start. It also yields unusable rows, so that every row keeps its position."""
    is_eval_file: bool = False
    """Whether all its rows are evaluation rows."""
    mix_entry: int = 0
    """Inputs of one entry of a mix share `num_rows`."""


def check_text(value: Any, where: str) -> None:
    """Check that a cell holds text that every tokenizer and file format accepts.

    Raises:
        UserError: another type, a NUL character, half a surrogate pair; the sentence begins with `where`.
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
