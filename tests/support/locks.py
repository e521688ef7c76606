"""A process that holds a lock, on a file system with locks or without."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_HOLDER = """
import sys
from pathlib import Path
from tests.support.locks import refuse_locks
from toolkit.files.lock import take_lock

if sys.argv[2] == "no locks":
    import fcntl
    fcntl.flock = fcntl.lockf = refuse_locks
take_lock(Path(sys.argv[1]), "held")
print("held", flush=True)
sys.stdin.read()
"""


def refuse_locks(*_: object) -> None:
    """What `flock` and `lockf` do on a file system that has no locks."""
    raise OSError(errno.ENOSYS, "Function not implemented")


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the locks of all file systems away from this process."""
    monkeypatch.setattr("fcntl.flock", refuse_locks)
    monkeypatch.setattr("fcntl.lockf", refuse_locks)


@contextmanager
def lock_held(path: Path, *, has_locks: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock; it is killed in the end."""
    arguments = [sys.executable, "-c", _HOLDER, str(path), "locks" if has_locks else "no locks"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()
