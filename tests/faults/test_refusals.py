"""What the system refuses a rank: the run ends on all ranks with one sentence, and goes on from the last checkpoint as if
nothing had been.

What cannot be saved is the checkpoint of step 3, by a run that goes on from that of step 2; the next would be that of step 6.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
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
from tests.faults.workers.faulty_recipe import at_step, before, refuse, tell, this_rank, this_run, wrap
from tests.support.workbench import Workbench, step_name

EVERY_3: dict[str, Any] = {"checkpoint__every_steps": 3}
WAITED_FOR = EVERY_3 | {"checkpoint__async_save": False}


# --- What the system does. Each is called on every rank.


def on_rank(rank: int, event: str, path: str, act: Callable[[], None]) -> None:
    """Do it to one rank, in the place of a file operation."""
    if this_rank() == rank:
        before(event, path, act)


def limit_files(num_bytes: int) -> None:
    """No file gets longer than that."""
    tell()
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def die(kind: type[BaseException]) -> None:
    tell()
    raise kind


def bad_disk() -> None:
    """What rank 1 has written does not reach the disk."""
    fsync = os.fsync

    def fail() -> None:
        def refuse_fsync(descriptor: int) -> None:
            os.fsync = fsync
            refuse(errno.EIO)

        os.fsync = refuse_fsync

    on_rank(1, "open", SHARD, fail)


def save_by_step_4(fault: Fault) -> None:
    """Begin step 4 when the save has come to its end: how fast the disk is decides nothing."""
    fault()
    at_step(4, wait_for_writer)


def wait_for_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(PATIENCE_S)


def full_from(kind: str, step: int) -> None:
    """No more room for the lines of one kind in metrics.jsonl from a step on."""
    from toolkit.tracking.metrics_log import MetricsLog

    write = MetricsLog.write

    class Full:
        def write(self, text: bytes) -> int:
            tell()
            raise OSError(errno.ENOSPC, NO_SPACE)

        def fileno(self) -> int:
            raise OSError(errno.ENOSPC, NO_SPACE)

        def close(self) -> None:
            pass

    def write_in_no_room(log: Any, of: str, at: int, **figures: Any) -> None:
        if log._file is not None and of == kind and at >= step:
            log._file = Full()
        write(log, of, at, **figures)

    MetricsLog.write = write_in_no_room  # type: ignore[method-assign]


def hold_the_lock() -> None:
    """Another process has it, as long as this one lives."""
    from toolkit.launch import run_folder

    run_folder.LOCK_TIMEOUT_S = 0.5
    if this_rank() != 0:
        return
    tell()
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(this_run() / ".lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"


def under_torch_elastic() -> None:
    """Each rank has a folder of the launch, through which it learns that another one has printed its sentence."""
    launch = this_run().with_name(f"{this_run().name}.launch") / "attempt_0"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(launch / str(this_rank()) / "error.json")
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True, exist_ok=True)


def no_memory_at_step(step: int) -> None:
    """On one rank, where no rank asks the others how they are."""
    under_torch_elastic()
    if this_rank() == 1:
        at_step(step, partial(die, MemoryError))


def few_open_files() -> None:
    """No rank can open one more, once they have met in their store."""
    from toolkit.launch import accelerator

    def limit() -> None:
        tell()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))

    under_torch_elastic()
    wrap(accelerator, "connecting", limit)


def refuse_reads_of_weights() -> None:
    """The disk under the model fails after its files were opened."""
    from toolkit.models import safetensors_index

    if this_rank() == 1:
        wrap(safetensors_index, "_read_part", lambda *_: refuse(errno.EIO))


def refuse_to_open_tokens() -> None:
    """Only by the rank that did not make them."""
    import datasets

    if this_rank() == 1:
        wrap(datasets, "load_from_disk", lambda *_: refuse(errno.EIO))


SHARD = r"{3}.tmp/state/__1_0\.distcp w "
MANIFEST = r"{3}.tmp/manifest\.json\.tmp w "
READ_ONLY_NOW, NO_ROOM = partial(refuse, errno.EROFS), partial(refuse, errno.ENOSPC)
NO_SPACE, FULL, READ_ONLY = "No space left on device", "File too large", "Read-only file system"
UNSAVED = f"checkpoint .*/checkpoints/{step_name(3)} could not be written: .*"
IO = "the system refuses: Input/output error.*; check that disk or network file system, and start the same command again"
# Name: what happens, the sentence, settings, the checkpoint that stands then.
REFUSALS: dict[str, tuple[Fault, str, dict[str, Any], int]] = {
    # A save, in its own thread or waited for.
    "end of a shard": (partial(on_rank, 1, "open", SHARD, partial(limit_files, 300_000)), f"{UNSAVED}{FULL}.*", EVERY_3, 2),
    "shard, waited for": (partial(on_rank, 1, "open", SHARD, partial(limit_files, 20_000)), f"{UNSAVED}{FULL}.*", WAITED_FOR, 2),
    "manifest": (partial(on_rank, 0, "open", MANIFEST, NO_ROOM), f"{UNSAVED}{NO_SPACE}.*", EVERY_3, 2),
    "folder": (partial(on_rank, 0, "os.mkdir", r"{3}.tmp", READ_ONLY_NOW), f"{UNSAVED}{READ_ONLY}.*", EVERY_3, 2),
    "rename": (partial(on_rank, 0, "os.rename", "{3}.tmp .*{3} ", READ_ONLY_NOW), f"{UNSAVED}{READ_ONLY}.*", EVERY_3, 2),
    "bad disk": (bad_disk, f"{UNSAVED}Input/output error.*", EVERY_3, 2),
    "no memory": (partial(on_rank, 1, "open", SHARD, partial(die, MemoryError)), f"{UNSAVED}Cannot alloc.*", EVERY_3, 2),
    # The figures: no checkpoint is newer than its lines.
    "lines of training": (partial(full_from, "train", 5), rf".*/metrics\.jsonl cannot be written \({NO_SPACE}\): fix.*", {}, 4),
    "lines of an evaluation": (partial(full_from, "eval", 6), r".*/metrics\.jsonl cannot be written .*", {}, 4),
    "rows": (partial(on_rank, 1, "open", r"rows-00001\.jsonl a ", NO_ROOM), r".*/rows-00001\.jsonl cannot be written .*", {}, 2),
    "cutting": (partial(on_rank, 0, "open", r"metrics\.jsonl\.tmp w", NO_ROOM), r".*/metrics\.jsonl cannot be used .*", {}, 2),
    "folder in use": (hold_the_lock, r"another run is writing into .*: wait for its end, or take another run\.name", {}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_written_ends_the_run_which_goes_on_from_the_last_checkpoint(faulty_bench: Workbench, name: str) -> None:
    fault, sentence, changes, stands = REFUSALS[name]
    run = stopped_after(faulty_bench, name, step=2)
    fault = partial(save_by_step_4, fault) if changes else fault
    outcome = attempt_with(faulty_bench, name, fault, log_every_steps=50, **changes)
    assert outcome.injected
    check_one_sentence(outcome, sentence)
    assert "CheckpointException" not in outcome.stderr, outcome.stderr
    if changes:
        assert faulty_bench.lines(name, "train")[-1]["step"] <= 5, "ended later than after the step that follows"
    assert max(whole_checkpoints(run)) == stands and max(faulty_bench.checkpoints(name)) == step_name(stands)
    resume(faulty_bench, name, from_step=stands)
    check_like_whole(faulty_bench, name, SAVED)


# From the start, without a cache.
GIVEN_TO_ONE: dict[str, tuple[Fault, str]] = {
    "memory at step 3": (partial(no_memory_at_step, 3), "the system refuses: Cannot allocate memory; .*"),
    "open files": (few_open_files, r"the system refuses: Too many open files.*; raise the limit on open files .*"),
    "reading weights": (refuse_reads_of_weights, IO),
    "opening tokens": (refuse_to_open_tokens, IO),
}


@pytest.mark.parametrize("name", GIVEN_TO_ONE)
def test_what_one_rank_is_refused_ends_both(faulty_bench: Workbench, name: str) -> None:
    fault, sentence = GIVEN_TO_ONE[name]
    outcome = attempt_with(faulty_bench, f"refused {name}", fault, data__cache_dir=faulty_bench.runs / "cache")
    assert outcome.injected, outcome.stdout
    check_one_sentence(outcome, sentence)


def test_a_writer_that_dies_of_its_own_error_ends_the_run(faulty_bench: Workbench) -> None:
    """Which no system is the cause of: the error is named."""
    run = stopped_after(faulty_bench, "dead writer", step=2)
    fault = partial(on_rank, 1, "open", r"{3}.tmp/rng-00001\.safetensors r ", partial(die, SystemExit))
    outcome = attempt_with(faulty_bench, run.name, partial(save_by_step_4, fault), **EVERY_3)
    assert outcome.injected and all(code > 0 for code in outcome.returncodes), outcome.stderr[-6000:]
    said = f"checkpoint {run / 'checkpoints' / step_name(3)} could not be written: SystemExit"
    assert said in outcome.stderr and whole_checkpoints(run) == [2], outcome.stderr[-6000:]


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
    DISKS["small disk"] = (small_disk, "", "No space left on device")
    DISKS["read-only checkpoints"] = (read_only, "checkpoints", READ_ONLY)


@pytest.mark.parametrize("name", DISKS)
def test_a_real_disk_that_refuses_ends_the_run(faulty_bench: Workbench, name: str) -> None:
    bench, (disk, folder, reason) = faulty_bench, DISKS[name]
    run = stopped_after(bench, name, step=2)
    with disk(run / folder) as give_way:
        outcome = attempt_with(bench, name, partial(at_step, 4, wait_for_writer), **EVERY_3)
        check_one_sentence(outcome, f"{UNSAVED}{reason}.*")
        assert bench.checkpoints(name) == [step_name(2)]
        give_way()
        resume(bench, name, from_step=2)
        check_like_whole(bench, name, SAVED)
