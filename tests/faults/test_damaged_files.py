"""A checkpoint that is not what was saved: the resume names file and reason, and goes on from the one before it.

A damaged checkpoint is that of step 4, the newest of a run that was killed after it; the one before is that of step 2.
"""

from __future__ import annotations

import re
import shutil

from tests.faults.harness import (
    SAVED,
    check_like_whole,
    read_manifest,
    resume,
    stopped_after,
    write_manifest,
)
from tests.support.workbench import Workbench, step_name

NEWEST = step_name(4)


def test_the_one_before_is_taken(faulty_bench: Workbench) -> None:
    """More damages: `tests/unit/checkpoint/test_find.py`; tensors that no file has: `tests/unit/checkpoint/test_dcp.py`."""
    run = stopped_after(faulty_bench, "truncated", step=4)
    shard = run / "checkpoints" / NEWEST / "state/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    printed = resume(faulty_bench, run.name, from_step=2)
    reason = rf"{NEWEST}/state/__1_0\.distcp has \d+ bytes instead of \d+"
    assert re.search(f"^WARNING: {reason}$", printed, re.MULTILINE), printed
    check_like_whole(faulty_bench, run.name, SAVED)


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
