"""Atomic, durable writes: a power cut, a kill or a full disk leaves either the old file or the complete new one.

People share run folders, exports and caches, so every file gets the mode that the umask or the folder's default ACL gives to new
files. A file that may not be read need not be damaged, so the error does not advise to rewrite or remove it.
"""

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

WAY_IN = "ask its owner, or chmod"
_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""Begins the text that a clone without git-lfs has in place of a large file."""


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


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Refuse files that are pointers, by a `UserError` with the first; paths without a file do not matter."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise UserError(f"{path} is a git-lfs pointer, not the file itself: type git lfs pull where it was cloned")


@contextmanager
def denials_named(what: str) -> Iterator[None]:
    """Turn a `PermissionError` into a `UserError` that begins with `what`."""
    try:
        yield
    except PermissionError as error:
        # Arrow's error has the name in its message.
        name = f"{error.filename} cannot be read (Permission denied)" if error.filename else error.strerror
        raise UserError(f"{what}: {name}: {WAY_IN}") from None


logger = logging.getLogger("toolkit")
_unsynced: set[int] = set()
"""Devices whose folders cannot be synced, and which were reported."""


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` on success. On failure it is removed, and the old file stays."""
    beside = path.with_name(f"{path.name}.tmp")
    try:
        yield beside
        fsync_path(beside)  # some file systems report a full disk only here
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def hash_file(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and hash of files, for a manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name)} for name in names}


def list_files(folder: Path) -> list[str]:
    """Paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fsync_path(path: Path) -> None:
    """Make the content of a file durable or, of a folder, the names that were created or renamed in it.

    Some file systems (FUSE, SMB) cannot sync a folder; that is reported once for each.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS) or not path.is_dir():
            raise
        if (device := path.stat().st_dev) not in _unsynced:
            _unsynced.add(device)
            logger.warning(
                f"the file system of {path} cannot sync a folder ({error.strerror}): a power cut may undo the newest renames, "
                "and a resume then takes an older checkpoint"
            )
    finally:
        os.close(descriptor)


def fsync_names(folder: Path) -> None:
    """Make all names below a folder durable, without the files' contents."""
    for subfolder in {path.parent for path in folder.rglob("*")} | {folder}:
        fsync_path(subfolder)


def fsync_tree(folder: Path) -> None:
    """Make a folder durable, with all files and names below it."""
    for name in list_files(folder):
        fsync_path(folder / name)
    fsync_names(folder)


def save_json(path: Path, value: Any) -> None:
    """Write a JSON file, or leave the old one as it is. It is on the disk when this returns."""
    with written_beside(path) as beside, beside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the sha256 of its other content, so that a changed byte is detected."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
