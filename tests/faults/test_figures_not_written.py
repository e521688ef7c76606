"""Figures that cannot be written, or read again: one sentence on every rank, and no checkpoint is newer than its lines."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest

from tests.faults.harness import SAVED, attempt_with, check_like_whole, check_one_sentence, resume, stopped_after
from tests.faults.workers.faulty_recipe import before, refuse, tell, this_rank
from tests.support.workbench import Workbench, step_name

NO_SPACE = "No space left on device"


def full_from(kind: str, step: int) -> None:
    """No more room for the lines of one kind from a step on."""
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


def no_room(path: str, rank: int) -> None:
    if this_rank() == rank:
        before("open", path, partial(refuse, errno.ENOSPC))


@pytest.mark.parametrize(("kind", "step", "stands"), [("train", 3, 2), ("train", 5, 4), ("eval", 6, 4)])
def test_no_checkpoint_is_newer_than_its_lines(faulty_bench: Workbench, kind: str, step: int, stands: int) -> None:
    run = stopped_after(faulty_bench, f"no room for {kind} {step}", step=2)
    outcome = attempt_with(faulty_bench, run.name, partial(full_from, kind, step), log_every_steps=50)
    assert outcome.injected
    check_one_sentence(outcome, rf"{run}/metrics\.jsonl cannot be written \({NO_SPACE}\): fix that.*")
    assert max(faulty_bench.checkpoints(run.name)) == step_name(stands)
    resume(faulty_bench, run.name, from_step=stands)
    check_like_whole(faulty_bench, run.name, SAVED)


REFUSED = {
    "rows that cannot be logged": (r"rows-00001\.jsonl a ", 1, r"rows-00001\.jsonl cannot be written"),
    "no room to cut the record at a resume": (r"metrics\.jsonl\.tmp w", 0, r"metrics\.jsonl cannot be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_a_rank_cannot_write_ends_the_run(faulty_bench: Workbench, name: str) -> None:
    path, rank, sentence = REFUSED[name]
    run = stopped_after(faulty_bench, name, step=2)
    outcome = attempt_with(faulty_bench, name, partial(no_room, path, rank=rank))
    assert outcome.injected
    check_one_sentence(outcome, rf"{run}/{sentence} \({NO_SPACE}\): fix that.*")
    resume(faulty_bench, name, from_step=2)
    check_like_whole(faulty_bench, name, SAVED)


def test_a_broken_line_is_named_on_all_ranks(faulty_bench: Workbench) -> None:
    run = stopped_after(faulty_bench, "broken line", step=2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], "{torn\n", *lines[1:]]))
    outcome = attempt_with(faulty_bench, run.name)
    check_one_sentence(outcome, rf"{run}/metrics\.jsonl, line 2: not JSON \(.*\): correct or remove the line, and run .*")


def test_another_run_in_the_folder_is_kept_out(faulty_bench: Workbench) -> None:
    run = stopped_after(faulty_bench, "in use", step=2)
    outcome = attempt_with(faulty_bench, run.name, partial(hold, str(run / ".lock")))
    check_one_sentence(outcome, rf"another run is writing into {run}: wait for its end, or take another run\.name")
    resume(faulty_bench, run.name, from_step=2)
    check_like_whole(faulty_bench, run.name, SAVED)


def hold(path: str) -> None:
    """Another process has the lock, as long as this one lives."""
    import subprocess
    import sys

    from toolkit.launch import run_folder

    run_folder.LOCK_TIMEOUT_S = 0.5
    if this_rank() != 0:
        return
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
