"""Each curve has the figure and the steps that it is named after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.report_runs import save_distinct_run, save_run, train
from toolkit.report.charts import Curve, _means, list_charts, table_rows
from toolkit.report.facts import read_runs

STEPS, EVALUATED = [1, 2, 3, 4, 5, 6], [2, 4, 6]


def test_curves_and_marks_are_those_of_their_names(tmp_path: Path) -> None:
    charts = list_charts(read_runs([save_distinct_run(tmp_path / "run")]))
    found = {chart.title: {curve.label: (curve.steps, curve.values) for curve in chart.curves} for chart in charts}
    trained = [(STEPS, [tens + step for step in STEPS]) for tens in (10, 20, 30, 40, 50, 60)]
    assert found == {
        "Loss": {"training": trained[0], "evaluation": (EVALUATED, [3, 2.5, 2.75])},
        "ROUGE-1": {"evaluation": (EVALUATED, [41, 42, 43]), "of rows a": ([0, 6], [44, 44])},
        "ROUGE-L": {"evaluation": (EVALUATED, [20, 30, 30]), "of rows a": ([0, 6], [17, 17])},
        "Learning rate": {"learning rate": trained[1]},
        "Gradient norm": {"gradient norm": trained[2]},
        "Speed": {"speed": trained[3]},
        "Step time": {"step time": trained[4]},
        "Peak memory": {"peak memory": trained[5]},
    }
    assert all(chart.marks == (("checkpoint", (2, 4, 6)), ("skip", (3,)), ("resume", (5,))) for chart in charts)
    assert "evaluation: from 3 at step 2 to 2.75 at step 6, lowest 2.5, highest 3." in charts[0].description


def test_zeros_are_not_on_a_log_scale(tmp_path: Path) -> None:
    lines = [train(step, grad_norm=step - 1.0) for step in (1, 2)]
    [chart] = [chart for chart in list_charts(read_runs([save_run(tmp_path / "run", *lines)])) if chart.title == "Gradient norm"]
    assert not chart.is_log and "log" not in chart.unit


def test_means_of_a_long_curve() -> None:
    curve = Curve("", "", list(range(10, 130)), [float(step % 2) for step in range(10, 130)])
    assert table_rows(curve)[:2] == [("10 to 11", "0 to 1, mean 0.5"), ("12 to 13", "0 to 1, mean 0.5")]
    steps, means = _means(Curve("", "", curve.steps, [3.0] * 120))
    assert steps[0] == 10 and steps[-1] == 129 and means == pytest.approx([3.0] * len(steps))
