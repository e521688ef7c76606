"""Cache folders. Like checkpoints they are written beside, hashed, fsynced and renamed; they are verified before they are read.

    <name>/                complete, with hashes in `about.json`; or damaged
    unfinished-<random>/   being written by the process that holds its `lock`, or left behind by a killed one

Processes on several machines may share a cache. They may read, build or rebuild the same folder at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, refused
from toolkit.files.durable import describe_files, fsync_names, fsync_path, hash_file, list_files, save_json, seal
from toolkit.files.modes import denials_named

logger = logging.getLogger("toolkit")

ABOUT = "about.json"
UNFINISHED = "unfinished-"
IDLE_S = 24 * 3600
"""An unfinished folder without writes for this long counts as left behind where locks cannot say so: some file systems have
no locks, and some show them only to processes of the same machine."""
_LOCK = "lock"
_ours: set[Path] = set()
"""Unfinished folders of this process, which its own locks do not protect from it."""


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for cached rows and tokens: `data.cache_dir`, or a folder in the Hugging Face cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "toolkit"


def find_or_build(what: str, folder: Path, build: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the description of a cache folder; build the folder first if it is missing or damaged.

    Args:
        what: the folder's content, for messages: "the token cache".
        build: called with `arguments` and a folder, which it fills; returns its description as JSON values.

    Raises:
        UserError: the cache cannot be written or read, or a damaged folder belongs to another user; those of `build`.
    """
    _remove_left_overs(folder.parent)
    seen = _identify(folder)
    if seen and (about := _load_about(what, folder)) is not None:
        return about
    try:
        with _unfinished_folder(folder.parent) as beside:
            if seen:
                logger.warning(f"{what} {folder} is damaged: it is built again", extra={"concerns_this_rank": True})
                _move_away(what, folder, seen, beside)
            unfinished = beside / "content"
            unfinished.mkdir()
            about = build(*arguments, unfinished)
            about = seal({**about, "files": describe_files(unfinished, list_files(unfinished))})
            save_json(unfinished / ABOUT, about)
            fsync_names(unfinished)
            return _put_in_place(what, unfinished, folder, beside) or about
    except UserError:
        raise
    except Exception as error:
        if (found := refused(error)) is None:
            raise
        raise UserError(
            f"{what} cannot be written to {folder.parent} ({found.strerror}): make room there, or set data.cache_dir"
        ) from None


def name_folder(identity: dict[str, Any]) -> str:
    """The name of a cache folder: sha256 of everything that decides its content, as JSON values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _put_in_place(what: str, unfinished: Path, folder: Path, beside: Path) -> dict[str, Any] | None:
    """Rename the finished folder to its name. If another run was faster and its folder is valid, return its description."""
    while True:
        try:
            unfinished.rename(folder)
        except OSError:
            if not (seen := _identify(folder)):
                raise
            if (about := _load_about(what, folder)) is not None:
                return about
            _move_away(what, folder, seen, beside)
        else:
            fsync_path(folder.parent)
            return None


def _load_about(what: str, folder: Path) -> dict[str, Any] | None:
    """Verify a folder and return its description; None if it is missing or damaged.

    Raises:
        UserError: the folder cannot be read (permissions or a failing file system), so that its state is unknown.
    """
    try:
        with denials_named("data.cache_dir"):
            about: dict[str, Any] = json.loads((folder / ABOUT).read_bytes())
            if about.get("sha256") != seal(about)["sha256"]:
                return None
            for name, expected in about["files"].items():
                path = folder / name
                if path.stat().st_size != expected["bytes"] or hash_file(path) != expected["sha256"]:
                    return None
            # A tokenizer may load any file in its folder, so an extra one counts as damage; but no hidden one, as file browsers
            # and network file systems leave.
            visible = [path for path in folder.glob("tokenizer/*") if not path.name.startswith(".")]
            unnamed = {str(path.relative_to(folder)) for path in visible} - about["files"].keys()
            return None if unnamed else about
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{what} {folder} cannot be read ({error.strerror}): fix that, or set data.cache_dir") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, or of another form
        return None


def _identify(folder: Path) -> tuple[int, int] | None:
    """(device, inode) of the folder, to notice a replacement; None if there is no folder.

    Raises:
        UserError: the file system does not say.
    """
    try:
        with denials_named("data.cache_dir"):
            status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): fix that, or set data.cache_dir") from None
    return status.st_dev, status.st_ino


def _move_away(what: str, folder: Path, seen: tuple[int, int], beside: Path) -> None:
    """Move a damaged folder away, unless another run has replaced it since it was `seen`."""
    damaged = Path(tempfile.mkdtemp(dir=beside)) / "damaged"
    try:
        if _identify(folder) == seen:
            folder.rename(damaged)
    except FileNotFoundError:  # another run was faster
        return
    except OSError as error:
        raise UserError(
            f"{what} {folder} is damaged and cannot be replaced ({error.strerror}): ask its owner, or set data.cache_dir to a "
            "folder of your own"
        ) from None
    if _identify(damaged) not in (seen, None):  # another run replaced it just before the rename: put that back
        with suppress(OSError):  # a third run has put one there already
            damaged.rename(folder)


@contextmanager
def _unfinished_folder(cache: Path) -> Iterator[Path]:
    """A locked temporary folder in the cache; the lock distinguishes it from one that a killed run has left behind."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Processes of other machines may have the same pid.
        beside = Path(tempfile.mkdtemp(dir=cache, prefix=UNFINISHED))
    except OSError as error:
        raise UserError(f"the cache folder {cache} cannot be written ({error.strerror}): set data.cache_dir") from None
    _ours.add(beside)
    try:
        with _locked(beside):
            yield beside
            for path in [path for path in beside.iterdir() if path.is_dir()]:
                shutil.rmtree(path, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _ours.discard(beside)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a record lock, as for the run folder: child processes do not inherit it, and a kill releases it."""
    new = folder / f"{_LOCK}.new"
    with new.open("w") as file:
        file.write(_this_machine())
        file.flush()
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCK)  # only now, so that the file is never there without its lock
        yield


def _remove_left_overs(cache: Path) -> None:
    """Remove the unfinished folders of dead processes, and print which."""
    found: set[Path] = set()
    with suppress(OSError):  # what may not be read is reported by whoever reads the cache
        found = set(cache.glob(f"{UNFINISHED}*"))
    for path in sorted(found - _ours):
        with suppress(OSError):  # already gone, or another user's
            if _is_left_over(path):
                shutil.rmtree(path, ignore_errors=True)  # another run may be removing it too
                if not path.exists():
                    logger.info(f"removed {path}, left behind by a killed run", extra={"concerns_this_rank": True})


def _is_left_over(folder: Path) -> bool:
    is_idle = time.time() - max(os.lstat(path).st_mtime for path in [folder, *folder.rglob("*")]) > IDLE_S
    if not (folder / _LOCK).exists():  # written by an earlier version, or just being created
        return is_idle
    with (folder / _LOCK).open("r+") as file:  # NFS locks only files that are open for writing
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return is_idle
        return is_idle or file.read() == _this_machine()


def _this_machine() -> str:
    """Host name and boot: nodes may share a name, and a lock may be seen on its own machine only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
