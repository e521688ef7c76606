"""A checkpoint that is not what was saved: the resume names file and reason, and goes on from the one before it. And caches.

A damaged checkpoint is that of step 4, the newest of a run that was killed after it; the one before is that of step 2.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults.harness import (
    SAVED,
    attempt_with,
    check_like_whole,
    check_one_sentence,
    make_the_manifest_match,
    read_manifest,
    resume,
    run_with,
    stopped_after,
    write_manifest,
)
from tests.faults.workers.faulty_recipe import before, kill, this_rank
from tests.recipes.bad_input import contents
from tests.support.workbench import Workbench, step_name

SHARDS = ("state/__0_0.distcp", "state/__1_0.distcp")
NEWEST = step_name(4)

Damage = Callable[[Path], None]
"""Called with the checkpoint's folder."""


def cut(name: str, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def flip(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def drop_a_moment(folder: Path) -> None:
    """The index no longer names one of Adam's moments, and the manifest is that of a checkpoint which never had it."""
    metadata = pickle.loads((folder / "state/.metadata").read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.endswith(".exp_avg"))
    del metadata.state_dict_metadata[name]
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]
    (folder / "state/.metadata").write_bytes(pickle.dumps(metadata))
    make_the_manifest_match(folder)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated shard of rank 1": (partial(cut, SHARDS[1]), rf"{NEWEST}/{SHARDS[1]} has \d+ bytes instead of \d+"),
    "half a manifest": (partial(cut, "manifest.json"), rf"{NEWEST}/manifest.json cannot be read \(.+\)"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_taken(faulty_bench: Workbench, name: str) -> None:
    damage, reason = DAMAGES[name]
    run = stopped_after(faulty_bench, name, step=4)
    damage(run / "checkpoints" / NEWEST)
    printed = resume(faulty_bench, name, from_step=2)
    assert re.search(f"^WARNING: {reason}$", printed, re.MULTILINE), printed
    check_like_whole(faulty_bench, name, SAVED)


def test_without_a_valid_one_nothing_is_done(faulty_bench: Workbench) -> None:
    damage, reason = DAMAGES["half a manifest"]
    run = stopped_after(faulty_bench, "only half a manifest", step=4)
    for step in (2, 4):
        damage(run / "checkpoints" / step_name(step))
    before = contents(run)
    outcome = attempt_with(faulty_bench, run.name)
    both = rf"{reason}; {reason.replace(NEWEST, step_name(2))}"
    check_one_sentence(outcome, rf"no checkpoint in {run}/checkpoints is valid \({both}\): move them away to start from .*")
    assert contents(run) == before


def test_a_moment_that_no_file_lacks_is_missed_at_loading(faulty_bench: Workbench) -> None:
    """The manifest and the index say that all is well."""
    run = stopped_after(faulty_bench, "no moment", step=4)
    folder = run / "checkpoints" / NEWEST
    drop_a_moment(folder)
    before = contents(run)
    sentence = rf"checkpoint {folder} cannot be loaded: {folder}/state holds no optimizer\.state\..*\.exp_avg"
    check_one_sentence(attempt_with(faulty_bench, run.name), sentence)
    assert contents(run) == before, "a run that goes on from another checkpoint would miss it"


def test_leftovers_and_parts_of_checkpoints_do_not_count(faulty_bench: Workbench) -> None:
    """Leftovers look whole except for their names, and go. Parts are as a copy leaves them that was broken off: that of a step
    which is not saved again stays for its owner to look at."""
    run = stopped_after(faulty_bench, "leftovers", step=4)
    for step, suffix in ((6, ".tmp"), (5, ".tmp"), (5, ".removing"), (2, ".removing"), (5, ""), (6, "")):
        folder = shutil.copytree(run / "checkpoints" / NEWEST, run / "checkpoints" / f"{step_name(step)}{suffix}")
        write_manifest(folder, read_manifest(folder) | {"step": step})
        (folder / "state" / "another file").touch()
        if not suffix:
            (folder / "manifest.json").unlink()
    printed = resume(faulty_bench, run.name, from_step=4)
    for step in (5, 6):
        assert f"{step_name(step)} has no manifest.json: it was never finished\n" in printed
    check_like_whole(faulty_bench, run.name, SAVED, others=(step_name(5),))
    assert not (run / "checkpoints" / step_name(6) / "state" / "another file").exists()


def kill_in_the_token_cache() -> None:
    if this_rank() == 0:
        before("open", r"/cache/unfinished-[^/]*/content/tokenizer/", partial(kill, 0, 1), standing="/")


def test_damaged_caches_are_named_and_built_again(faulty_bench: Workbench, tmp_path: Path) -> None:
    """Also what a run has left that was killed while it built one."""
    cache, name = tmp_path / "cache", "caches"
    assert attempt_with(faulty_bench, name, kill_in_the_token_cache, data__cache_dir=cache).injected
    (left,) = cache.glob("unfinished-*")
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))  # for more than a day nothing was written into it
    for kind, files in (
        ("cache of rows", (cache / "rows").glob("*/train.arrow")),
        ("token cache", cache.glob("*/train/*.arrow")),
    ):
        damaged = next(files)
        flip(damaged.name, damaged.parent)
        printed = run_with(faulty_bench, name, data__cache_dir=cache)
        assert re.search(f"^WARNING: the {kind} .* is damaged: it is built again$", printed, re.MULTILINE), printed
        assert (f"removed {left}, left behind by a killed run\n" in printed) == (kind == "cache of rows")
        assert ("resuming from" in printed) == (kind == "token cache"), "the tokens are those that the run was trained on"
        check_like_whole(faulty_bench, name, SAVED)
    assert not list(cache.rglob("unfinished-*"))
