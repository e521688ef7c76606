"""What may change between a stop and the resume, and what is refused by its name."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.faults.harness import TRAINED, attempt_with, run_with
from tests.recipes.bad_input import OTHER_DATA, contents
from tests.recipes.test_resume import curves, rows_by_step
from tests.support.launch import LaunchResult
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.workbench import Workbench, new_bench, step_name
from toolkit.errors import EXIT_USER_ERROR

CHANGES: dict[str, Any] = TRAINED | {"train__max_steps": 4, "optim__schedule": "constant"}
LONGER = {"train__max_steps": 6}

CHANGED_DATA = f"the data is not what {{checkpoint}} was trained on, {OTHER_DATA}"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "precision": (
        {"overrides": {"mixed_precision": "bf16"}},
        "mixed_precision is 'bf16', but {checkpoint} was made with 'no': set it back in the accelerate YAML ('no' without one)",
    ),
    "one row of the data": ({"data__files": "edited.jsonl"}, CHANGED_DATA),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The runs of this file: `four` of 4 steps and `six` of 6, both finished."""
    bench = new_bench(tmp_path_factory, "changed")
    run_with(bench, "four", **CHANGES)
    run_with(bench, "six", **CHANGES | LONGER)
    rows = make_rows(60)
    rows[17]["target"] += " alpha"
    save_jsonl(bench.runs / "edited.jsonl", rows)
    shutil.copy(bench.data / bench.rows, bench.runs / "moved.jsonl")
    return bench


def refused(bench: Workbench, name: str, **changes: Any) -> LaunchResult:
    """A resume that must be refused; nothing of the run may have changed by it."""
    before = contents(bench.runs / name)
    result = attempt_with(bench, name, **changes)
    assert set(result.returncodes) == {EXIT_USER_ERROR}, result.stderr[-6000:]
    assert "Traceback" not in result.stderr
    assert contents(bench.runs / name) == before
    return result


def check_like_six(bench: Workbench, name: str, evaluated: list[int], saved: list[int]) -> None:
    """The steps, rows and last tensors are those of `six`, bit for bit."""
    assert [curves(line) for line in bench.lines(name, "train")] == [curves(line) for line in bench.lines("six", "train")]
    assert rows_by_step(bench.runs / name) == rows_by_step(bench.runs / "six")
    assert [line["step"] for line in bench.lines(name, "eval")] == evaluated
    assert bench.checkpoints(name) == [step_name(step) for step in saved]
    actual, expected = (
        {path.name: path.read_bytes() for path in bench.checkpoint(run, 6).glob("*/*.distcp")} for run in (name, "six")
    )
    assert actual == expected != {}


@pytest.mark.parametrize("what", REFUSED)
def test_change_is_refused_by_name(bench: Workbench, what: str) -> None:
    changes, sentence = REFUSED[what]
    if file := changes.get("data__files"):
        changes = {"data__files": bench.runs / file}
    result = refused(bench, "four", **CHANGES | LONGER | changes)
    checkpoint = bench.runs / "four" / "checkpoints" / "step-00000004"
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    where = sentence.format(checkpoint=checkpoint)
    assert said.startswith(f"error: {where if 'set it back' in where else f'{where}: set it back'} to resume"), said


def test_steps_raised_after_the_end_go_on_from_the_last_checkpoint(bench: Workbench) -> None:
    """The curve is that of a run which was to be so long from the start, as the schedule does not depend on it."""
    shutil.copytree(bench.runs / "four", bench.runs / "raised")
    printed = run_with(bench, "raised", **CHANGES | LONGER)
    assert "step-00000004, after step 4\n" in printed
    check_like_six(bench, "raised", evaluated=[4, 6], saved=[2, 4, 6])


def test_steps_lowered_below_the_last_checkpoint_leave_nothing_to_train(bench: Workbench) -> None:
    before = (bench.runs / "four" / "metrics.jsonl").read_bytes()
    printed = run_with(bench, "four", **CHANGES | {"train__max_steps": 3})
    assert "nothing left to train: the run is complete at step 4\n" in printed
    assert (bench.runs / "four" / "metrics.jsonl").read_bytes() == before
    assert bench.checkpoints("four") == ["step-00000002", "step-00000004"]


def test_what_is_no_part_of_the_training_may_change(bench: Workbench) -> None:
    """All of it at once; the run is the same, bit for bit, in its last steps."""
    shutil.copytree(bench.runs / "six", bench.runs / "free", ignore=shutil.ignore_patterns("step-00000004", "step-00000006"))
    free = {
        "data__files": bench.runs / "moved.jsonl",
        "data__num_loader_workers": 2,
        "data__cache_dir": bench.runs / "cache",
        "log_every_steps": 2,
        "eval__every_steps": 5,
        "eval__batch_size_rows": 1,
        "checkpoint__every_steps": 3,
        "checkpoint__keep_last": 5,
        "checkpoint__async_save": False,
        "optim__max_skipped_steps": 9,
        "run__timeout_s": 1000,
    }
    assert "step-00000002, after step 2\n" in run_with(bench, "free", **CHANGES | LONGER | free)
    check_like_six(bench, "free", evaluated=[5, 6], saved=[2, 3, 6])
