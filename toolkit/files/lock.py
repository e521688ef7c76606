"""The lock of whatever only one process may write: a run folder or an output of `generate`.

It is `flock`: a kill releases it, and filelock closes it in forked children. Where the file system has no locks, a file beside
it names the process that holds it; after a kill, the next one on the same machine takes it over.
"""

import atexit
import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, SoftFileLock, Timeout, UnixFileLock

from toolkit.errors import UserError

logger = logging.getLogger("toolkit")

HOLDER = ".holder"
"""Ends the name of the file that stands for a lock."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
_held: dict[Path, tuple[BaseFileLock, os.stat_result]] = {}
"""A lock is the process's: whoever else asks for it here holds it too."""


def take_lock(path: Path, refusal: str, timeout_s: float = 0.0) -> bool:
    """Lock `path`, an empty file that nothing else is written to, until `release_lock` or the end of the process. Returns whether
    it is locked; where no lock works at all, a warning says so.

    If another process has held it for `timeout_s`, that is a `UserError` that begins with `refusal`. A file that cannot be opened
    is an `OSError`: a `FileNotFoundError` if its folder is removed meanwhile.
    """
    if holds_lock(path):
        return True
    release_lock(path)  # of a file that was removed
    # Not filelock's own fallback: it takes an empty file, as a lock leaves it, for one that is held for ever.
    soft = SoftFileLock(f"{path}{HOLDER}", thread_local=False)
    for lock in (UnixFileLock(path, thread_local=False, fallback_to_soft=False), soft):
        try:
            lock.acquire(timeout_s + 0.1)  # so that it is tried again after the file of a dead process was removed
        except Timeout:
            hint = f"; or, if it was killed, remove {lock.lock_file}: this file system has no locks" if lock is soft else ""
            raise UserError(refusal + hint) from None
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed on another node of a network file system
                return take_lock(path, refusal, timeout_s)
            if error.errno not in _NO_LOCKS:
                raise
        else:
            _held[path] = lock, os.stat(lock.lock_file)
            atexit.register(soft.release)
            return True
    sentence = f"{path} cannot be locked, so make sure that no other process writes there: this file system has no locks"
    logger.warning(sentence, extra={"concerns_this_rank": True})
    return False


def holds_lock(path: Path) -> bool:
    """Whether this process holds the lock, and its file was not removed or replaced."""
    with suppress(KeyError, OSError):
        lock, locked = _held[path]
        return lock.is_locked and os.path.samestat(locked, os.stat(lock.lock_file))  # a forked child holds none
    return False


def release_locks() -> None:
    """Release every lock of this process."""
    for path in list(_held):
        release_lock(path)


def release_lock(path: Path, *, remove: bool = False) -> None:
    """Let other processes, and later work of this one, lock `path`, if this one holds it."""
    if path not in _held:
        return
    with suppress(OSError):  # the file is gone
        if remove:
            path.unlink()  # while it is held, so that whoever has opened it notices
        _held[path][0].release()
    del _held[path]
