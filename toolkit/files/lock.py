"""The lock of whatever only one process may write: a run folder, a cache folder that is being built, an output of `generate`.

It is `flock`: a kill releases it, and filelock closes it in forked children. Where the file system has no locks, a file beside
it names the process that holds it; after a kill, the next one on the same machine takes it over.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
from pathlib import Path

from filelock import BaseFileLock, SoftFileLock, Timeout, UnixFileLock

from toolkit.errors import UserError

logger = logging.getLogger("toolkit")

HOLDER = ".holder"
"""Ends the name of the file that stands for a lock."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
_held: dict[Path, tuple[BaseFileLock, int | None]] = {}


def take_lock(path: Path, refusal: str, timeout_s: float = 0.0) -> bool:
    """Lock `path`, an empty file that nothing else is written to, until `release_lock` or the end of the process.

    Returns:
        Whether it is locked. Where no lock works at all, a warning says so.

    Raises:
        UserError: another process has held it for `timeout_s`; begins with `refusal`.
        OSError: the file cannot be opened; `FileNotFoundError` if its folder is removed meanwhile.
    """
    if holds_lock(path):
        return True
    release_lock(path)  # of a file that was removed
    opened: list[int] = []
    try:
        # filelock's own fallback takes an empty file, as a lock leaves it, for one that is held for ever.
        lock: BaseFileLock = UnixFileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=opened.append)
        lock.acquire(timeout_s)
    except Timeout:
        raise UserError(refusal) from None
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed on another node of a network file system
            return take_lock(path, refusal, timeout_s)
        if error.errno not in _NO_LOCKS:
            raise
        lock = SoftFileLock(f"{path}{HOLDER}", thread_local=False)
        try:
            lock.acquire(timeout_s + 0.1)  # one more try: the first may remove that of a dead process
        except Timeout as held:
            raise UserError(f"{refusal}; or, if it was killed, remove {held.lock_file}: this file system has no locks") from None
        except OSError:
            sentence = f"{path} cannot be locked ({error.strerror}): make sure that no other process writes there"
            logger.warning(sentence, extra={"concerns_this_rank": True})
            return False
        atexit.register(lock.release)
    _held[path] = lock, opened[0] if opened else None
    return True


def holds_lock(path: Path) -> bool:
    """Whether this process holds the lock, and its file was not removed or replaced."""
    lock, descriptor = _held.get(path, (None, None))
    if lock is None or not lock.is_locked:  # a forked child holds none
        return False
    if descriptor is None:
        return isinstance(lock, SoftFileLock) and lock.is_lock_held_by_us
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # removed here, or on another node
            raise
        return False


def release_lock(path: Path) -> None:
    """Let other processes, and later work of this one, lock `path`. The file stays."""
    if path in _held:
        with contextlib.suppress(OSError):  # the file is gone
            _held.pop(path)[0].release()
