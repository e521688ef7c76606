"""Atomic, durable writes: a power cut, a kill or a full disk leaves either the old file or the complete new one."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """Size and hash of files, for a manifest. Each file is on the disk when this returns."""
    described = {}
    for name in names:
        path = folder / name
        fsync_path(path)
        described[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return described


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
    """Make all names below a folder durable. It does not sync the files' contents; `describe_files` does."""
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
