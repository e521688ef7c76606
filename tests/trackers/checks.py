"""Runs with a tracker, and the comparison of what its store has with `metrics.jsonl`."""

import shutil

import pytest

from tests.support.rank import PAGES
from tests.support.workbench import Workbench

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


def check_refused(bench: Workbench, tracker: str, **changes) -> str:
    """A tracker that cannot start is one sentence on all ranks, before the model is built; returns why and what helps."""
    refused = bench.attempt("refused", tracking__log_with=[tracker], **changes)
    assert "T5Block" not in refused.stdout, "the model was built"
    start, end = f"tracking.log_with: {tracker} could not start (", "metrics.jsonl is written in any case"
    assert refused.refusal().startswith(start) and refused.refusal().endswith(f", or leave it out of tracking.log_with; {end}")
    return refused.refusal().removeprefix(start)
