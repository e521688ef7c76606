"""SIGKILL at each moment of a save: the resume goes on at the last checkpoint that stood, and comes to the same end.

A moment is the file operation that does not come to pass any more. `keep_last` is 1, so that each save also prunes; the save of
step 4 is struck unless a case says otherwise.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from tests.faults.harness import (
    NUM_STEPS,
    attempt_with,
    check_like_whole,
    check_survivors_ended_by_themselves,
    complete_checkpoints,
    resume,
    stopped_after,
    write_manifest,
)
from tests.faults.workers.faulty_recipe import before, kill, this_rank
from tests.support.same_runs import read_manifest
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


def in_shard(die: Callable[[], None]) -> None:
    """When six tensors are in the shard's file, and half of the seventh."""

    def die_in_seventh() -> None:
        import torch

        torch_save, numbers = torch.save, itertools.count(1)

        def save_and_die(tensor, file) -> None:
            saved = BytesIO()
            torch_save(tensor, saved)
            if next(numbers) == 7:
                file.write(saved.getvalue()[: saved.tell() // 2])
                file.flush()
                die()
            file.write(saved.getvalue())

        torch.save = save_and_die

    before("open", r"{4}.tmp/state/__\d_0\.distcp w ", die_in_seventh)


def in_manifest(die: Callable[[], None]) -> None:
    """When half of it is in the file."""

    def die_in_half() -> None:
        json_dump = json.dump

        def dump_and_die(value, file, **options) -> None:
            text = json.dumps(value, **options)
            file.write(text[: len(text) // 2])
            file.flush()
            die()
            file.write(text[len(text) // 2 :])
            json.dump = json_dump

        json.dump = dump_and_die

    before("open", r"{4}.tmp/manifest\.json\.tmp w ", die_in_half)


def break_step_4(run: Path) -> None:
    """A checkpoint of step 4 that is not whole stands in the way."""
    (run / "checkpoints" / step_name(4) / "state" / "__1_0.distcp").unlink()


def owe_an_evaluation(run: Path) -> None:
    """The checkpoint of step 4 as a signal leaves it that comes in the evaluation: it is done, and saved, again."""
    folder = run / "checkpoints" / step_name(4)
    manifest = read_manifest(folder)
    manifest["state"] |= {"evaluation_due": True, "best_value": None}
    write_manifest(folder, manifest | {"metrics": {}})
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if '"kind": "eval"' not in line]
    (run / "metrics.jsonl").write_text("".join(lines))


OLD, REMOVING = f"{step_name(4)}.old", f"{step_name(2)}.removing"
MOMENTS = {
    "before the first write": file_moment("os.mkdir", "{4}.tmp", 2),
    "before the first shard of rank 1": file_moment("open", r"{4}.tmp/state/__1_0\.distcp w ", 2, rank=1),
    "in the shard of rank 1": Moment(in_shard, 2, rank=1),
    "while hashing": file_moment("open", r"{4}.tmp/rng-00001\.safetensors r ", 2, rank=1),
    "between shards and manifest": file_moment("open", r"{4}.tmp/manifest\.json\.tmp w ", 2),
    "in the manifest": Moment(in_manifest, 2),
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
    assert [code == -9 for code in outcome.returncodes] == [rank in ranks for rank in (0, 1)], outcome.stderr[-6000:]
    check_survivors_ended_by_themselves(outcome)


def check_goes_on(bench: Workbench, name: str, step: int) -> None:
    """From that step, which must be that of the newest whole checkpoint, to the end of the run that nothing interrupted."""
    resume(bench, name, step, **KEEP_ONE)
    check_like_whole(bench, name, steps=(NUM_STEPS,))
