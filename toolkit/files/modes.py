"""Who may read what a run writes, and what is said where a file may not be read.

Every file gets the mode that the umask, or the folder's default ACL, gives to any other file there: people share run folders,
exports and caches. What cannot be read is not known to be damaged: nobody is advised to write it again or to remove it.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import UserError

WAY_IN = "ask its owner, or chmod"


def give_usual_mode(path: Path) -> None:
    """Give a file, or all files below a folder, the mode of a file that is created there by `open`.

    safetensors writes through a temporary file, which only its owner may read. The umask itself cannot be read without being
    changed, for all threads: so a file is created beside, and looked at.
    """
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        probe = file.with_name(f"{file.name}.mode")
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        if stat.S_IMODE(file.stat().st_mode) != mode:  # a file system without modes refuses to change one
            file.chmod(mode)


def check_readable(what: str, *folders: Path) -> None:
    """Refuse folders with a file that may not be read: safetensors would say that it does not exist, others that it is damaged.

    Raises:
        UserError: naming the file.
    """
    with denials_named(what):
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                if path.suffix in (".json", ".safetensors", ".arrow") and path.is_file():
                    path.open("rb").close()


@contextmanager
def denials_named(what: str) -> Iterator[None]:
    """A file or folder that may not be read is a `UserError` of one sentence, which begins with `what`."""
    try:
        yield
    except PermissionError as error:
        name = f"{error.filename} cannot be read (Permission denied)" if error.filename else error.strerror  # Arrow's names it
        raise UserError(f"{what}: {name}: {WAY_IN}") from None
