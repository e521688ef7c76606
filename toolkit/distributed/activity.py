"""Measures whether this process works, by its CPU time and IO: for library calls that report no progress.

A rank that waits for another over gloo takes 0.5 % of a core, and reads and writes nothing. A rank that is stopped, sleeps, or
waits for a file system that no longer answers takes nothing at all.
"""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

MIN_CORE_SHARE = 0.05
"""The process works from this CPU time on, as a share of one core, including its children."""
MIN_IO_BYTES_PER_S = 2**14
"""The process works from this rate of reads and writes on, including its children: a slow file system takes little CPU time."""


class Activity:
    """Measures work in windows of `window_s`, long enough that a short moment of a housekeeping thread does not count.
    `min_io_bytes_per_s` is above `MIN_IO_BYTES_PER_S` if the process does other IO that does not count."""

    def __init__(self, window_s: float, min_io_bytes_per_s: float = MIN_IO_BYTES_PER_S) -> None:
        self._window_s, self._min_io_bytes_per_s = window_s, min_io_bytes_per_s
        self._process, self._bytes_of_looks = psutil.Process(), 0
        self.restart(0.0)

    def restart(self, not_counted_s: float) -> None:
        """Start a window. `not_counted_s`: CPU time so far of the threads that do not count."""
        self._begin_s, self._before = time.monotonic(), self._count(not_counted_s)

    def has_worked(self, not_counted_s: float) -> bool:
        """Whether a window is over and had work in it. After a window, the next one starts."""
        seconds = time.monotonic() - self._begin_s
        if seconds < self._window_s:
            return False
        cpu_before_s, bytes_before = self._before
        self.restart(not_counted_s)
        cpu_s, num_bytes = self._before
        uses_cpu = cpu_s - cpu_before_s >= MIN_CORE_SHARE * seconds
        return uses_cpu or num_bytes - bytes_before >= self._min_io_bytes_per_s * seconds

    def _count(self, not_counted_s: float) -> tuple[float, int]:
        """CPU seconds and bytes so far, of the process and its descendants. Those of an ended child count as its parent's."""
        # The process's own clock is finer than the ticks that psutil reads.
        own_bytes = _num_bytes(self._process)
        cpu_s, num_bytes = time.process_time() - not_counted_s, own_bytes - self._bytes_of_looks
        with suppress(psutil.Error, OSError):  # such as no file descriptor left
            times = self._process.cpu_times()
            cpu_s += times.children_user + times.children_system
            for child in _descendants(self._process.pid):
                with suppress(psutil.Error, OSError):  # the child has ended
                    cpu_s += sum(child.cpu_times()[:4])  # its own, and those of its ended children
                    num_bytes += _num_bytes(child)
        self._bytes_of_looks += _num_bytes(self._process) - own_bytes
        return cpu_s, num_bytes


def _descendants(pid: int) -> Iterator[psutil.Process]:
    """Children, their children, and so on. Reads a file for every process on the machine.

    `Process.children` gives none where the system hides a single process of another user (/proc mounted with `hidepid`).
    """
    children: dict[int | None, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    parents = [pid]
    while parents:
        found = children.get(parents.pop(), [])
        yield from found
        parents += [process.pid for process in found]


def _num_bytes(process: psutil.Process) -> int:
    """Bytes read and written so far; 0 if the system does not count them."""
    with suppress(psutil.Error, OSError, AttributeError, ValueError, RuntimeError):
        io = process.io_counters()
        # Device bytes too: only they include reads of memory-mapped files.
        return io.read_bytes + io.write_bytes + getattr(io, "read_chars", 0) + getattr(io, "write_chars", 0)
    return 0
