"""Saves that a file system refuses, or whose writer dies: reported in one sentence, in time, and nothing that stood is lost.

What cannot be written is the checkpoint of step 3, by a run that goes on from that of step 2; the next would be that of step 6.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    PATIENCE_S,
    SAVED,
    Fault,
    attempt_with,
    check_like_whole,
    check_one_sentence,
    resume,
    stopped_after,
    whole_checkpoints,
)
from tests.faults.workers.faulty_recipe import at_step, before, refuse, tell, this_rank
from tests.support.workbench import Workbench, step_name

EVERY_3 = {"checkpoint__every_steps": 3}


# --- What a file system does to a save. Each is called on every rank, with the rank that it befalls.


def no_room_for(event: str, path: str, num_bytes: int, rank: int) -> None:
    """No file gets longer than that, as soon as the file is about to be opened."""
    if this_rank() == rank:
        before(event, path, partial(limit_files, num_bytes))


def limit_files(num_bytes: int) -> None:
    tell()
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def no_room_for_random_state(rank: int) -> None:
    from toolkit.checkpoint import save as checkpoint_writer

    save = checkpoint_writer.save_random_state

    def save_in_no_room(state: Any, folder: Path) -> str:
        if this_rank() == rank and folder.name.startswith(step_name(3)):
            limit_files(10_000)
        return save(state, folder)

    checkpoint_writer.save_random_state = save_in_no_room


def refused(event: str, path: str, number: int, rank: int) -> None:
    if this_rank() == rank:
        before(event, path, partial(refuse, number))


def bad_disk(rank: int) -> None:
    """What was written does not reach the disk."""
    fsync = os.fsync

    def fail() -> None:
        def refuse_fsync(descriptor: int) -> None:
            os.fsync = fsync
            refuse(errno.EIO)

        os.fsync = refuse_fsync

    if this_rank() == rank:
        before("open", rf"{{3}}.tmp/state/__{rank}_0\.distcp w ", fail)


SHARD = r"{{3}}.tmp/state/__{}_0\.distcp w "
FULL, READ_ONLY = "File too large", "Read-only file system"
REFUSALS: dict[str, tuple[Fault, str]] = {
    "disk full for the shard of rank 1": (partial(no_room_for, "open", SHARD.format(1), 20_000, rank=1), FULL),
    "disk full for the end of a shard": (partial(no_room_for, "open", SHARD.format(1), 300_000, rank=1), FULL),
    "disk full for the random state of rank 1": (partial(no_room_for_random_state, rank=1), FULL),
    "disk full for the manifest": (
        partial(refused, "open", r"{3}.tmp/manifest\.json\.tmp w ", errno.ENOSPC, rank=0),
        "No space left",
    ),
    "read-only for the folder": (partial(refused, "os.mkdir", r"{3}.tmp", errno.EROFS, rank=0), READ_ONLY),
    "read-only for the rename": (partial(refused, "os.rename", "{3}.tmp .*{3} ", errno.EROFS, rank=0), READ_ONLY),
    "bad disk under rank 1": (partial(bad_disk, rank=1), "Input/output error"),
}


def until_it_has_failed(fault: Fault, step: int) -> None:
    """Begin the step after the save when that has come to its end: how fast the disk is decides nothing."""
    fault()
    at_step(step, wait_for_writer)


def wait_for_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(PATIENCE_S)


WAITED_FOR = ["disk full for the shard of rank 1", "read-only for the rename"]


@pytest.mark.parametrize(("name", "async_save"), [*((name, True) for name in REFUSALS), *((name, False) for name in WAITED_FOR)])
def test_a_save_that_is_refused_ends_the_run(faulty_bench: Workbench, name: str, async_save: bool) -> None:
    bench, (fault, reason) = faulty_bench, REFUSALS[name]
    run = stopped_after(bench, f"{name}, {async_save}", step=2)
    fault = partial(until_it_has_failed, fault, step=4)
    outcome = attempt_with(bench, run.name, fault, **EVERY_3, checkpoint__async_save=async_save)
    assert outcome.injected
    check_refused(bench, run, outcome, reason)
    resume(bench, run.name, from_step=2)
    check_like_whole(bench, run.name, SAVED)


def check_refused(bench: Workbench, run: Path, outcome: Any, reason: str) -> None:
    """One sentence, at the latest after the step that follows the one in which it failed; what stood still stands."""
    check_one_sentence(outcome, rf"checkpoint {run}/checkpoints/{step_name(3)} could not be written: .*{reason}.*")
    assert "CheckpointException" not in outcome.stderr, outcome.stderr
    assert bench.lines(run.name, "train")[-1]["step"] <= 5
    assert bench.checkpoints(run.name) == [step_name(2)] and whole_checkpoints(run) == [2]


# --- The same with real file systems, where this process may mount some (which takes root), or is bound by permissions.


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    mount(*arguments, str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """The folder, with what is in it, on a disk with room for half a checkpoint more; call what is given for more room."""
    content = shutil.copytree(folder, folder.with_name(f"{folder.name} elsewhere"))
    with mounted(folder, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        shutil.copytree(content, folder, dirs_exist_ok=True)
        disk = os.statvfs(folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        mount("-o", f"remount,size={used + 600_000}", str(folder))
        yield lambda: mount("-o", "remount,size=64m", str(folder))
        shutil.copytree(folder, content, dirs_exist_ok=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Callable[[], None]]:
    """The folder on a file system that is read-only until what is given is called."""
    with mounted(folder, "--bind", str(folder)):
        mount("-o", "remount,ro,bind", str(folder))
        yield lambda: mount("-o", "remount,rw,bind", str(folder))


@contextmanager
def forbidden(folder: Path) -> Iterator[Callable[[], None]]:
    folder.chmod(0o555)
    yield lambda: folder.chmod(0o755)


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


DISKS: dict[str, tuple[Any, str, str]] = {}
"""What is done to which folder, and what the system says."""
if os.geteuid() != 0:
    DISKS["forbidden checkpoints"] = (forbidden, "checkpoints", "Permission denied")
if can_mount():
    DISKS["small disk for checkpoints"] = (small_disk, "checkpoints", "No space left on device")
    DISKS["small disk for all of the run"] = (small_disk, "", "No space left on device")
    DISKS["read-only checkpoints"] = (read_only, "checkpoints", READ_ONLY)


@pytest.mark.parametrize("name", DISKS)
def test_a_real_disk_that_refuses_ends_the_run(faulty_bench: Workbench, name: str) -> None:
    bench, (disk, folder, reason) = faulty_bench, DISKS[name]
    run = stopped_after(bench, name, step=2)
    with disk(run / folder) as give_way:
        outcome = attempt_with(bench, name, partial(at_step, 4, wait_for_writer), **EVERY_3)
        check_refused(bench, run, outcome, reason)
        give_way()
        resume(bench, name, from_step=2)
        check_like_whole(bench, name, SAVED)


# --- The writer's thread dies.


def die_in_thread(path: str, kind: type[BaseException], rank: int) -> None:
    if this_rank() == rank:
        before("open", path, partial(die, kind))


def die(kind: type[BaseException]) -> None:
    tell()
    raise kind


DEATHS: dict[str, tuple[str, type[BaseException], int]] = {
    "in the shard of rank 1": (SHARD.format(1), MemoryError, 1),
    "while hashing": (r"{3}.tmp/rng-00001\.safetensors r ", SystemExit, 1),
    "in the manifest": (r"{3}.tmp/manifest\.json\.tmp w ", MemoryError, 0),
}


@pytest.mark.parametrize("place", DEATHS)
def test_a_writer_that_dies_ends_the_run(faulty_bench: Workbench, place: str) -> None:
    bench, (path, kind, rank) = faulty_bench, DEATHS[place]
    run = stopped_after(bench, f"{kind.__name__} {place}", step=2)
    fault = partial(until_it_has_failed, partial(die_in_thread, path, kind, rank), step=4)
    outcome = attempt_with(bench, run.name, fault, timeout_s=PATIENCE_S, **EVERY_3)
    assert outcome.injected and all(code > 0 for code in outcome.returncodes), outcome.stderr[-6000:]
    assert outcome.seconds_after < PATIENCE_S / 3
    sentence = f"checkpoint {run / 'checkpoints' / step_name(3)} could not be written: "
    if kind is MemoryError:  # which the system is the cause of
        check_one_sentence(outcome, re.escape(f"{sentence}[Errno 12] Cannot allocate memory"))
    else:
        assert f"{sentence}{kind.__name__}" in outcome.stderr, outcome.stderr[-6000:]
    assert whole_checkpoints(run) == [2]
    resume(bench, run.name, from_step=2)
    check_like_whole(bench, run.name, SAVED)
