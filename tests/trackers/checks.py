"""Runs with a tracker, and the comparison of what its store has with `metrics.jsonl`."""

import shutil
from collections.abc import Callable
from unittest.mock import patch

import pytest

from tests.support.launch import run_on_ranks
from tests.support.rank import PAGES
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench

Points = dict[str, list[tuple[int, float]]]
"""By name of a figure, its steps and values in the order in which the tracker has them."""

SHORT = {
    "eval__generate": False,
    "optim__schedule": "constant",  # another `max_steps` changes no step
    "eval__every_steps": 2,
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 9,
}


def run_two(bench: Workbench, tracker: str) -> None:
    """`one`, a run of 4 steps, and `killed`, which is killed after step 4 and goes on from its checkpoint at step 2 to step 5."""
    options = {**SHORT, "tracking__log_with": [tracker], "tracking__project_name": "shelf"}
    bench.run("one", env=PAGES, train__max_steps=4, **options)
    bench.run("killed", train__max_steps=4, **options)
    shutil.rmtree(bench.checkpoint("killed", 4))
    printed = bench.run("killed", train__max_steps=5, **options)
    assert "step-00000002, after step 2" in printed


def check_points(bench: Workbench, name: str, points: Points) -> None:
    """Each loss of `metrics.jsonl` is there once, in order."""
    for kind in ("train", "eval"):
        wanted = [(line["step"], line["loss"]) for line in bench.lines(name, kind)]
        assert [step for step, _ in points[f"{kind}/loss"]] == [step for step, _ in wanted]
        assert [value for _, value in points[f"{kind}/loss"]] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert {"train/learning_rate", "train/tokens_per_s", "train/peak_memory_gib", "eval/rows_per_s"} <= points.keys()


def check_failure_in_mid_run(bench: Workbench, tracker: str, fail: Callable[[], None]) -> str:
    """After step 2 of 4, `fail` is called on rank 0: the run ends well, with all lines, and one warning; returns that."""
    flags = bench.flags("broken", train__max_steps=4, **SHORT, tracking__log_with=[tracker])
    printed = run_on_ranks(run_and_fail, preset="ddp_cpu", overrides=FP32, args=(flags, fail))[0]
    assert [line["step"] for line in bench.lines("broken", "train")] == [1, 2, 3, 4]
    assert (bench.runs / "broken" / "export" / "config.json").exists()
    (warning,) = [line for line in printed if line.startswith(f"{tracker} ")]
    return warning


def check_refused(bench: Workbench, tracker: str, **changes) -> str:
    """A tracker that cannot start is one sentence on all ranks, before the model is built; returns why and what helps."""
    refused = bench.attempt("refused", tracking__log_with=[tracker], **changes)
    assert "T5Block" not in refused.stdout, "the model was built"
    start, end = f"tracking.log_with: {tracker} could not start (", "metrics.jsonl is written in any case"
    assert refused.refusal().startswith(start) and refused.refusal().endswith(f", or leave it out of tracking.log_with; {end}")
    return refused.refusal().removeprefix(start)


def run_and_fail(argv: list[str], fail: Callable[[], None]) -> list[str]:
    """On every rank: the recipe; the warnings of the log."""
    import logging

    from toolkit.distributed.comm import rank
    from toolkit.training import loop

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    after_step = loop.call_after_step

    def call_after_step(run, step, lr: float, *, is_logged: bool) -> None:
        after_step(run, step, lr, is_logged=is_logged)
        if step.step == 2 and rank() == 0:
            fail()

    with patch.object(loop, "call_after_step", call_after_step):
        logging.getLogger("toolkit").addHandler(handler)
        run_in_this_process("t5", argv)
    return warnings
