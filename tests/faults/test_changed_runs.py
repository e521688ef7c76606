"""What may change between a stop and the resume; what may not is in `tests/unit/checkpoint/test_load.py`."""

from __future__ import annotations

import shutil
from typing import Any

from tests.faults.harness import WHOLE, resume, saved_state, stopped_after
from tests.recipes.test_resume import curves, rows_by_step
from tests.support.workbench import Workbench, step_name


def test_what_is_no_part_of_the_training_may_change(faulty_bench: Workbench) -> None:
    """All of it at once; the run is the same, bit for bit, in its last steps."""
    bench = faulty_bench
    stopped_after(bench, "free", step=2)
    free: dict[str, Any] = {
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
