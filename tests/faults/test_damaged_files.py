"""What a resume finds: a checkpoint that is not what was saved, of which it names file and reason and takes the one before; and
settings that may change between a stop and the resume. What may not is in `tests/unit/checkpoint/test_load.py`.

A damaged checkpoint is that of step 4, the newest of a run that was killed after it; the one before is that of step 2.
"""

import re
import shutil

from tests.faults.harness import SAVED, WHOLE, check_like_whole, resume, stopped_after, write_manifest
from tests.support.same_runs import curves, read_manifest, rows_by_step, saved_state
from tests.support.workbench import step_name

NEWEST = step_name(4)


def test_the_one_before_is_taken(faulty_bench):
    """More damages: `tests/unit/checkpoint/test_find.py`; tensors that no file has: `tests/unit/checkpoint/test_dcp.py`."""
    run = stopped_after(faulty_bench, "truncated", step=4)
    shard = run / "checkpoints" / NEWEST / "state/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    printed = resume(faulty_bench, run.name, from_step=2)
    reason = rf"{NEWEST}/state/__1_0\.distcp has \d+ bytes instead of \d+"
    assert re.search(f"^WARNING: {reason}$", printed, re.MULTILINE), printed
    check_like_whole(faulty_bench, run.name, SAVED)


def test_leftovers_and_parts_of_checkpoints_do_not_count(faulty_bench):
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
