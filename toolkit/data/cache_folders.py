"""Folders of the cache, committed as checkpoints are: written beside, hashed, fsynced, renamed; and checked before they are read.

    <name>/              what `about.json` says it is, or damaged
    unfinished-<drawn>/  being written by the process that locks the `lock` in it, or left over by one that was killed

Processes of several machines may share a cache, read and build the same folder, or build a damaged one again, at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files.durable import describe_files, fsync_names, fsync_path, hash_file, list_files, refused_write, save_json, seal
from toolkit.files.modes import denials_named

ABOUT = "about.json"
UNFINISHED = "unfinished-"
IDLE_S = 24 * 3600
"""Nothing was written for so long into what a killed run has left, where locks do not show that: some file systems have none,
and some show them to processes of the same machine only."""
_LOCK = "lock"
_ours: set[Path] = set()
"""Unfinished folders of this process, to which its own locks say nothing."""


def find_or_build(what: str, folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `build` says of the files that it has put into a folder, now or in an earlier run, if they are as they were then.

    Args:
        what: is in it, for messages: "the token cache".
        build: fills the folder that it is given; returns JSON values.

    Raises:
        UserError: the cache cannot be written or read, or a damaged folder is another user's; those of `build`.
    """
    _remove_left_overs(folder.parent)
    seen = _identify(folder)
    if seen and (about := _load_about(what, folder)) is not None:
        return about
    try:
        with _unfinished_folder(folder.parent) as beside:
            if seen:
                print(f"{what} {folder} does not hold what was written to it: it is built again", flush=True)
                _move_away(what, folder, seen, beside)
            unfinished = beside / "content"
            unfinished.mkdir()
            about = build(unfinished)
            about = seal({**about, "files": describe_files(unfinished, list_files(unfinished))})
            save_json(unfinished / ABOUT, about)
            fsync_names(unfinished)
            return _put_in_place(what, unfinished, folder, beside) or about
    except UserError:
        raise
    except Exception as error:
        if (reason := refused_write(error)) is None:
            raise
        raise UserError(
            f"{what} cannot be written to {folder.parent} ({reason}): make room there, or set data.cache_dir"
        ) from None


def _put_in_place(what: str, unfinished: Path, folder: Path, beside: Path) -> dict[str, Any] | None:
    """Rename what was built to its name; returns what is said of another run's folder where that is there already, and whole."""
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
    """What was said of a folder when it was written; None where it does not hold that any more.

    Raises:
        UserError: it may not be read, or the file system fails to, so that nobody knows what it holds.
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
            # A tokenizer is made of whatever files lie in its folder.
            unnamed = {str(path.relative_to(folder)) for path in folder.glob("tokenizer/*")} - about["files"].keys()
            return None if unnamed else about
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{what} {folder} cannot be read ({error.strerror}): mend that, or set data.cache_dir") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, or of another form
        return None


def _identify(folder: Path) -> tuple[int, int] | None:
    """Tells the folder from one that comes into its place; None where there is none."""
    try:
        with denials_named("data.cache_dir"):
            status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _move_away(what: str, folder: Path, seen: tuple[int, int], beside: Path) -> None:
    """Take a damaged folder out of its place, but not what another run may have put there since it was `seen`."""
    damaged = Path(tempfile.mkdtemp(dir=beside)) / "damaged"
    try:
        if _identify(folder) == seen:
            folder.rename(damaged)
    except FileNotFoundError:  # another run was faster
        return
    except OSError as error:
        raise UserError(
            f"{what} {folder} does not hold what was written to it, and cannot be replaced ({error.strerror}): ask its owner, or "
            "set data.cache_dir to a folder of your own"
        ) from None
    if _identify(damaged) not in (seen, None):  # it came between the look and the rename
        with suppress(OSError):  # there is one more already
            damaged.rename(folder)


@contextmanager
def _unfinished_folder(cache: Path) -> Iterator[Path]:
    """A folder of the cache for as long as this process needs it, which others can tell from a left-over."""
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
    """A record lock, as the run folder's: worker processes do not hold on to it, a kill releases it."""
    new = folder / f"{_LOCK}.new"
    with new.open("w") as file:
        file.write(socket.gethostname())
        file.flush()
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCK)  # so it is never there unlocked
        yield


def _remove_left_overs(cache: Path) -> None:
    """Remove the unfinished folders of processes that are no more, and say so."""
    for path in sorted(set(cache.glob(f"{UNFINISHED}*")) - _ours):
        with suppress(OSError):  # gone meanwhile, or another user's
            if _is_left_over(path):
                shutil.rmtree(path, ignore_errors=True)  # another start may be at it too
                if not path.exists():
                    print(f"removed {path}, which a run that was killed has left", flush=True)


def _is_left_over(folder: Path) -> bool:
    is_idle = time.time() - max(os.lstat(path).st_mtime for path in [folder, *folder.rglob("*")]) > IDLE_S
    if not (folder / _LOCK).exists():  # of an earlier version, or just being made
        return is_idle
    with (folder / _LOCK).open("r+") as file:  # to write: NFS locks no other
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return is_idle
        return is_idle or file.read() == socket.gethostname()
