"""Which weights `export.weights: best` takes: the best that can be exported, by figures of the same rows."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.support.workbench import Workbench

WORSENING: dict[str, Any] = {
    "optim__lr": 10.0,
    "optim__warmup_steps": 2,
    "train__max_steps": 5,
    "eval__at_start": True,
    "eval__every_steps": 1,
    "eval__generate": False,
    "eval__early_stopping_patience": 3,
    "checkpoint__keep_last": 1,
    "checkpoint__keep_best": 1,
    "export__weights": "best",
}
"""Steps so large that every one of them makes the model worse than it was at the start."""


@pytest.fixture(scope="module")
def worse(bench: Workbench) -> str:
    """What the run `worse` printed."""
    return bench.run("worse", **WORSENING)


def losses(bench: Workbench, name: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in bench.lines(name, "eval")}


def check_exported(bench: Workbench, name: str, loss: float, **changes: Any) -> None:
    """The exported folder, evaluated by a run of its own, has that loss."""
    alone = {"train__max_steps": 0, "eval__generate": False, **changes}
    bench.run(f"{name} exported", preset="single", model=bench.runs / name / "export", **alone)
    assert losses(bench, f"{name} exported")[0] == pytest.approx(loss, rel=1e-5)


def test_best_is_the_best_of_what_was_saved_and_not_the_start(bench: Workbench, worse: str) -> None:
    start, *after = losses(bench, "worse").values()
    best = after.index(min(after)) + 1
    assert start < min(after) and best == 1, "the run is to be better at its start, and not best at its end"
    assert bench.checkpoints("worse") == ["step-00000001", "step-00000004"]
    at_best = f"at best {min(after):.4g} after it"
    gained = f"no evaluated step is better than the start: loss {start:.4g} before the first step, {at_best}\n"
    assert f"stopping at step 4: 3 evaluations without gain in loss\n{gained}" in worse
    chosen = f"exporting the weights of step {best}, the best loss ({min(after):.4g}) of the checkpoints kept\n"
    assert worse.index(gained) < worse.index(chosen)
    check_exported(bench, "worse", min(after))
    exported = bench.runs / "worse" / "export"
    assert json.loads((exported / "toolkit.json").read_text())["step"] == best
    assert f"Weights in float32, after step {best}.\n" in (exported / "README.md").read_text()


def test_other_rows_and_more_steps_are_said_on_a_resume(bench: Workbench, worse: str) -> None:
    shutil.copytree(bench.runs / "worse", bench.runs / "resumed")
    before = losses(bench, "resumed")
    best = min(set(before) - {0}, key=before.__getitem__)
    longer = WORSENING | {"train__max_steps": 12}
    printed = bench.run("resumed", **longer, eval__num_rows=5)
    forgotten = f"the best loss so far, {before[best]:.4g}, is not compared with later values: "
    assert f"{forgotten}other rows are evaluated\n" in printed and "no evaluated step is better" not in printed
    rate = "the learning rate jumps up to 8 in step 5, after 6.67 in step 4"
    assert f"{rate}: the linear schedule now ends with step 12, before with step 5 (where step 5 had 3.33)\n" in printed
    after = {step: loss for step, loss in losses(bench, "resumed").items() if step > 4}
    assert min(after.values()) > before[best], "a comparison of figures that are not equals would not show"
    best = min(after, key=after.__getitem__)
    assert bench.checkpoints("resumed") == sorted({f"step-{step:08d}" for step in (best, max(after))})
    assert f"exporting the weights of step {best}, the best loss ({after[best]:.4g}) of the checkpoints kept\n" in printed
    assert f"; {len(before)} evaluations are not shown: measured on other rows" in printed
    assert "before training" not in printed and f"\nafter step {min(after)} " in printed
    check_exported(bench, "resumed", after[best], eval__num_rows=5)

    # Nothing is left to train, and nothing kept was measured on the rows of today: the last weights are evaluated on them.
    printed = bench.run("resumed", preset="single", **longer, eval__num_rows=4)
    assert "\nevaluation at step 12: loss " in printed and "\nexporting the weights of step 12, the best loss (" in printed
    assert "evaluations are not shown: measured on other rows" in printed


def test_a_complete_run_that_is_started_with_another_metric_measures_it(bench: Workbench) -> None:
    """It trains no more, but it is evaluated again."""
    short = {"train__max_steps": 2, "checkpoint__keep_best": 0}
    bench.run("metric", **short, eval__generate=False)
    assert "rougeL" not in bench.lines("metric", "eval")[-1]
    printed = bench.run("metric", **short, eval__generate=True, eval__best_metric="rougeL")
    assert "evaluation at step 2: " in printed and "step 2/2" not in printed
    [line] = [line for line in bench.lines("metric", "eval") if line["step"] == 2]
    assert "rougeL" in line
