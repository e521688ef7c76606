"""git-lfs pointers: the texts that a clone without git-lfs has in place of large files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from toolkit.errors import UserError

_POINTER = b"version https://git-lfs.github.com/spec/v1"


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Refuse files that are pointers, by a `UserError` with the first; paths without a file do not matter."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise UserError(f"{path} is a git-lfs pointer, not the file itself: type git lfs pull where it was cloned")
