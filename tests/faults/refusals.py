"""What the system refuses a rank: faults that `test_refusals.py` puts into a recipe. Each is called on every rank."""

import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.faults.harness import PATIENCE_S, Fault
from tests.faults.workers.faulty_recipe import at_step, before, refuse, tell, this_rank, wrap

PAGE_BYTES = 4096


def on_rank(rank: int, event: str, path: str, act: Callable[[], None], standing: str = "") -> None:
    """Do it to one rank, in the place of a file operation."""
    if this_rank() == rank:
        before(event, path, act, standing=standing)


def limit_files(num_bytes: int) -> None:
    """No file gets longer than that."""
    tell()
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def die(kind: type[BaseException]) -> NoReturn:
    tell()
    raise kind


# --- Saves.


def save_by_step_4(fault: Fault) -> None:
    """Begin step 4 when the save has come to its end: how fast the disk is decides nothing."""
    fault()
    at_step(4, wait_for_writer)


def wait_for_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(PATIENCE_S)


def hold_until_next_save() -> None:
    """The thread writes nothing before the next save is asked; it is still at work then."""
    from toolkit.checkpoint import save as checkpoint_writer

    asked = threading.Event()
    save, save_tensors = checkpoint_writer.CheckpointWriter.save, checkpoint_writer.save_tensors

    def save_and_let_go(self, state, **options):
        if self.is_writing:
            tell()
            threading.Timer(0.2, asked.set).start()  # it waits by then
        return save(self, state, **options)

    def wait_and_save(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert asked.wait(PATIENCE_S)
            asked.clear()
        return save_tensors(*arguments)

    checkpoint_writer.CheckpointWriter.save = save_and_let_go
    checkpoint_writer.save_tensors = wait_and_save


def fail_when_next_is_asked(path: str) -> None:
    """The save that writes this file is still under way when the next one is asked, and fails then."""
    hold_until_next_save()
    on_rank(1, "open", path, partial(refuse, errno.ENOSPC))


def stop_and_refuse(path: str) -> None:
    """SIGTERM in step 3, and a disk that does not take this file."""
    if this_rank() == 1:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        before("open", path, partial(refuse, errno.ENOSPC))


# --- Figures, and the folder.


def full_from(kind: str, step: int) -> None:
    """No more room for the lines of one kind in metrics.jsonl from a step on."""
    from toolkit.tracking.metrics_log import MetricsLog

    write = MetricsLog.write

    def write_in_no_room(log, of: str, at: int, **figures) -> None:
        is_full = log._file is not None and of == kind and at >= step
        if is_full:
            limit_files(log.path.stat().st_size)
        write(log, of, at, **figures)
        if is_full:
            limit_files(resource.RLIM_INFINITY)

    MetricsLog.write = write_in_no_room


# --- One rank alone.


def refuse_to_open_tokens() -> None:
    """Only by the rank that did not make them."""
    import datasets

    if this_rank() == 1:
        wrap(datasets.Dataset, "from_file", lambda *_: refuse(errno.EIO))


# --- A disk that is full, a terminal that is gone.


def fill(disk: Path, spare_pages: int) -> None:
    """Leave room for so many more pages of 4 KiB. Where the folder is not a disk of its own, refuse in place of that."""
    if not disk.is_mount():
        refuse(errno.ENOSPC)
    tell()
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(PAGE_BYTES))
    os.truncate(filler, filler.stat().st_size - spare_pages * PAGE_BYTES)


def lose(*numbers: int, is_terminal: bool) -> None:
    """The file descriptors lead to a closed terminal, or to a pipe that nobody reads any more."""
    import pty

    tell()
    other, lost = pty.openpty() if is_terminal else os.pipe()
    os.close(other)
    if is_terminal:
        sys.stderr.isatty = lambda: True  # it was one as the run began: bars are on it
    for number in numbers:
        os.dup2(lost, number)


def interrupt_with_its_reader(step: int) -> None:
    """Ctrl-C in `… | tee log` reaches the ranks and tee."""
    at_step(step, lambda: (lose(1, is_terminal=False), os.kill(os.getpid(), signal.SIGINT)))
