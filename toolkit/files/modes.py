"""Permissions of the files that a run writes, and errors for files that may not be read.

People share run folders, exports and caches, so every file gets the mode that the umask or the folder's default ACL gives to new
files. A file that may not be read need not be damaged, so the error does not advise to rewrite or remove it.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import UserError

WAY_IN = "ask its owner, or chmod"


def give_usual_mode(path: Path) -> None:
    """Give a file, or all files below a folder, the mode that `open` gives to a new file there.

    safetensors writes through a temporary file that only its owner may read. Reading the umask means changing it, for all
    threads, so the mode is taken from a probe file created beside.
    """
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        probe = file.with_name(f"{file.name}.mode")
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        if stat.S_IMODE(file.stat().st_mode) != mode:  # a file system without modes refuses chmod
            file.chmod(mode)


def check_readable(what: str, *folders: Path) -> None:
    """Refuse folders with a file that may not be read, by a `UserError` with its name. safetensors would report it as missing,
    other libraries as damaged."""
    with denials_named(what):
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                if path.suffix in (".json", ".safetensors", ".arrow") and path.is_file():
                    path.open("rb").close()


@contextmanager
def denials_named(what: str) -> Iterator[None]:
    """Turn a `PermissionError` into a `UserError` that begins with `what`."""
    try:
        yield
    except PermissionError as error:
        # Arrow's error has the name in its message.
        name = f"{error.filename} cannot be read (Permission denied)" if error.filename else error.strerror
        raise UserError(f"{what}: {name}: {WAY_IN}") from None
