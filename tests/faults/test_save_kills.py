"""SIGKILL at each moment of a save: the resume goes on at the last checkpoint that stood, and comes to the same end.

A moment is the file operation that does not come to pass any more. `keep_last` is 1, so that each save also prunes; the save of
step 4 is struck unless a case says otherwise. Also, what else a resume may find, and what may change before it.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path

import pytest
import torch

from tests.faults.harness import (
    NUM_STEPS,
    SAVED,
    WHOLE,
    attempt_with,
    check_killed,
    check_like_whole,
    complete_checkpoints,
    resume,
    stopped_after,
)
from tests.faults.workers.faulty_recipe import before, kill, this_rank
from tests.support.checkpoint_files import change_manifest
from tests.support.same_runs import curves, rows_by_step, saved_state
from tests.support.workbench import Workbench, step_name

KEEP_ONE = {"checkpoint__keep_last": 1}


@dataclass(frozen=True)
class Moment:
    """When to kill, on the rank whose moment it is; the others are killed by it, if they are to die."""

    watch: Callable[[Callable[[], None]], None]
    """Called with what kills, on the rank whose moment it is."""
    goes_on_from: int
    """The step of the checkpoint that stands, if the rank whose moment it is dies."""
    rank: int = 0
    prepare: Callable[[Path], None] | None = None
    """Done to the run as it stands after step 2, where the run to be killed is one that goes on from there; else it is new."""


def file_moment(event: str, path: str, goes_on_from: int, standing: str = "", **more) -> Moment:
    return Moment(partial(before, event, path, standing=standing), goes_on_from, **more)


def half_written(owner, name: str, buffer: Callable, nth: int, path: str, die: Callable[[], None]) -> None:
    """When half of what the n-th call of `owner.name` writes into a file is in it. `buffer` makes one like it, in memory."""

    def die_in_nth() -> None:
        write, numbers = getattr(owner, name), itertools.count(1)

        def write_and_die(value, file, **options) -> None:
            write(value, written := buffer(), **options)
            content, half = written.getvalue(), written.tell() // 2
            file.write(content[:half])
            if next(numbers) == nth:
                file.flush()
                die()
            file.write(content[half:])

        setattr(owner, name, write_and_die)

    before("open", path, die_in_nth)


def break_step_4(run: Path) -> None:
    """A checkpoint of step 4 that is not whole stands in the way."""
    (run / "checkpoints" / step_name(4) / "state" / "__1_0.distcp").unlink()


def owe_an_evaluation(run: Path) -> None:
    """The checkpoint of step 4 as a signal leaves it that comes in the evaluation: it is done, and saved, again."""
    owed = {"evaluation_due": True, "best_value": None}
    folder = run / "checkpoints" / step_name(4)
    change_manifest(folder, lambda manifest: manifest.update(state=manifest["state"] | owed, metrics={}))
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if '"kind": "eval"' not in line]
    (run / "metrics.jsonl").write_text("".join(lines))


SHARD, MANIFEST = r"{4}.tmp/state/__1_0\.distcp w ", r"{4}.tmp/manifest\.json\.tmp w "
OLD, REMOVING = f"{step_name(4)}.old", f"{step_name(2)}.removing"
MOMENTS = {
    "before the first write": file_moment("os.mkdir", "{4}.tmp", 2),
    "before the first shard of rank 1": file_moment("open", SHARD, 2, rank=1),
    "in the shard of rank 1": Moment(partial(half_written, torch, "save", BytesIO, 7, SHARD), 2, rank=1),
    "while hashing": file_moment("open", r"{4}.tmp/rng-00001\.safetensors r ", 2, rank=1),
    "between shards and manifest": file_moment("open", MANIFEST, 2),
    "in the manifest": Moment(partial(half_written, json, "dump", StringIO, 1, MANIFEST), 2),
    "before the rename": file_moment("os.rename", "{4}.tmp .*{4} ", 2),
    "after the rename": file_moment("open", "/checkpoints None", 4, standing=step_name(4)),
    "before a broken one is put aside": file_moment("os.rename", "{4} .*{4}.old", 2, prepare=break_step_4),
    "a broken one is put aside": file_moment("os.rename", "{4}.tmp .*{4} ", 2, standing=OLD, prepare=break_step_4),
    "a broken one is replaced": file_moment("os.rename", r"{4}.old .*{4}.removing", 4, standing=OLD, prepare=break_step_4),
    "a whole one is put aside": file_moment("os.rename", "{4}.tmp .*{4} ", 4, standing=OLD, prepare=owe_an_evaluation),
    "before pruning": file_moment("os.rename", r"{2} .*{2}\.removing", 4),
    "in pruning, after some removals": file_moment("os.rmdir", "^state ", 4, standing=REMOVING),
}
ALONE = ["before the first shard of rank 1", "in the shard of rank 1", "in the manifest", "before the rename", "after the rename"]
"""Moments at which only one rank is killed."""


def die_at(moment: str, ranks: tuple[int, ...]) -> None:
    """On every rank."""
    if this_rank() == MOMENTS[moment].rank:
        MOMENTS[moment].watch(partial(kill, *ranks))


@pytest.mark.parametrize(("moment", "alone"), [*((moment, False) for moment in MOMENTS), *((moment, True) for moment in ALONE)])
def test_all_ranks_or_the_one_at_work_are_killed(faulty_bench, moment, alone):
    name = f"{'one' if alone else 'both'} {moment}"
    kill_a_run(faulty_bench, name, moment, ranks=(MOMENTS[moment].rank,) if alone else (0, 1))
    check_goes_on(faulty_bench, name, MOMENTS[moment].goes_on_from)


@pytest.mark.parametrize("moment", ALONE)
def test_the_other_rank_is_killed(faulty_bench, moment):
    """The rank at work may still come to the end of its save, or not; a resume takes what there is."""
    name = f"other {moment}"
    kill_a_run(faulty_bench, name, moment, ranks=(1 - MOMENTS[moment].rank,))
    newest = complete_checkpoints(faulty_bench.runs / name)[-1]
    assert newest == 2 or (newest == 4 and "rename" in moment or "manifest" in moment)
    check_goes_on(faulty_bench, name, newest)


def kill_a_run(bench: Workbench, name: str, moment: str, ranks: tuple[int, ...]) -> None:
    if prepare := MOMENTS[moment].prepare:
        prepare(stopped_after(bench, name, step=4))
    outcome = attempt_with(bench, name, partial(die_at, moment, ranks), **KEEP_ONE)
    check_killed(outcome, ranks)
    if prepare is break_step_4:
        assert f"WARNING: {step_name(4)} lacks state/__1_0.distcp\n" in outcome.stdout + outcome.stderr


def check_goes_on(bench: Workbench, name: str, step: int) -> None:
    """From that step, which must be that of the newest whole checkpoint, to the end of the run that nothing interrupted."""
    resume(bench, name, step, **KEEP_ONE)
    check_like_whole(bench, name, steps=(NUM_STEPS,))


# --- What a resume finds or changes; the settings that it may not change are in `tests/unit/checkpoint/test_load.py`.


def test_leftovers_and_parts_of_checkpoints_do_not_count(faulty_bench):
    """Leftovers look whole except for their names, and go. Parts are as a copy leaves them that was broken off: that of a step
    which is not saved again stays for its owner to look at."""
    run = stopped_after(faulty_bench, "leftovers", step=4)
    for step, suffix in ((6, ".tmp"), (5, ".tmp"), (5, ".removing"), (2, ".removing"), (5, ""), (6, "")):
        folder = shutil.copytree(run / "checkpoints" / step_name(4), run / "checkpoints" / f"{step_name(step)}{suffix}")
        change_manifest(folder, lambda manifest, step=step: manifest.update(step=step))
        (folder / "state" / "another file").touch()
        if not suffix:
            (folder / "manifest.json").unlink()
    printed = resume(faulty_bench, run.name, from_step=4)
    for step in (5, 6):
        assert f"{step_name(step)} has no manifest.json: it was never finished\n" in printed
    check_like_whole(faulty_bench, run.name, SAVED, others=(step_name(5),))
    assert not (run / "checkpoints" / step_name(6) / "state" / "another file").exists()


def test_what_is_no_part_of_the_training_may_change(faulty_bench):
    """All of it at once; the run is the same, bit for bit, in its last steps."""
    bench = faulty_bench
    stopped_after(bench, "free", step=2)
    free = {
        "data__files": shutil.copy(bench.data / bench.rows, bench.runs / "moved.jsonl"),
        "data__num_loader_workers": 2,
        "data__cache_dir": bench.runs / "free cache",
        "log_every_steps": 2,
        "eval__every_steps": 5,
        "eval__batch_size_rows": 1,
        "checkpoint__every_steps": 3,
        "checkpoint__keep_last": 5,
        "checkpoint__async_save": False,
        "optim__max_skipped_steps": 9,
        "run__timeout_s": 1000,
    }
    resume(bench, "free", from_step=2, **free)
    assert [curves(line) for line in bench.lines("free", "train")] == [curves(line) for line in bench.lines(WHOLE, "train")]
    assert rows_by_step(bench.runs / "free") == rows_by_step(bench.runs / WHOLE)
    assert [line["step"] for line in bench.lines("free", "eval")] == [5, 6]
    assert bench.checkpoints("free") == [step_name(step) for step in (2, 3, 6)]
    free_state, whole_state = ({**saved_state(bench.checkpoint(run, 6)), "metrics": {}} for run in ("free", WHOLE))
    assert {name for name in whole_state if free_state[name] != whole_state[name]} <= {"state"}, "weights, moments, random state"
