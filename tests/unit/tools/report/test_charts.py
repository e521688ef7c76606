"""Each curve has the figure and the steps that it is named after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_runs import evaluation, save_distinct_run, save_run, train
from toolkit.tools.report.charts import Curve, list_charts, means, table_rows
from toolkit.tools.report.facts import describe_unlike, read_runs
from toolkit.tools.report.page import render_page
from toolkit.tools.report.terminal import show_runs

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


@pytest.mark.parametrize("measured_on", ["x", 5, {"sets": ["news"]}, {"sets": "news"}])
def test_a_line_that_does_not_say_what_it_is_of_is_left_out(tmp_path: Path, measured_on: Any) -> None:
    lines = [evaluation(0, loss=2.0), evaluation(1, loss=1.0, measured_on=measured_on)]
    (run,) = read_runs([save_run(tmp_path / "run", *lines)])
    assert run.evaluations == lines[:1] and render_page([run])


def test_sets_share_the_charts_of_their_run_and_have_none_beside_other_runs(tmp_path: Path) -> None:
    of_sets = {"news/loss": 3.0, "mail/loss": 1.0, "measured_on": {"rows": "0", "sets": {"news": "1", "mail": "2"}}}
    folders = [save_run(tmp_path / name, evaluation(0, loss=2.0, **of_sets)) for name in ("a", "b")]
    for shown, labels in ((folders[:1], ["evaluation", "news", "mail"]), (folders, ["a: evaluation", "b: evaluation"])):
        (chart,) = list_charts(read_runs(shown))
        assert [curve.label for curve in chart.curves] == labels


def test_zeros_are_not_on_a_log_scale(tmp_path: Path) -> None:
    lines = [train(step, grad_norm=step - 1.0) for step in (1, 2)]
    [chart] = [chart for chart in list_charts(read_runs([save_run(tmp_path / "run", *lines)])) if chart.title == "Gradient norm"]
    assert not chart.is_log and "log" not in chart.unit


def test_means_of_a_long_curve() -> None:
    curve = Curve("", "", list(range(10, 130)), [float(step % 2) for step in range(10, 130)])
    assert table_rows(curve)[:2] == [("10 to 11", "0 to 1, mean 0.5"), ("12 to 13", "0 to 1, mean 0.5")]
    steps, averaged = means(Curve("", "", curve.steps, [3.0] * 120))
    assert len({*means(Curve("", "", curve.steps, [0.1] * 120))[1]}) == 1, "a constant has constant means"
    assert steps[0] == 10 and steps[-1] == 129 and averaged == pytest.approx([3.0] * len(steps))


def test_figures_of_other_rows_share_no_axis(tmp_path: Path) -> None:
    """Losses depend on the rows alone, texts also on how they are generated."""
    measured = {"a": {"rows": "1", "num_beams": 1}, "b": {"rows": "1", "num_beams": 4}, "c": {"rows": "2", "num_beams": 1}}
    folders = [
        save_run(tmp_path / name, train(1), evaluation(1, loss=2.0, rougeL=9.0, measured_on=of)) for name, of in measured.items()
    ]
    runs = read_runs([*folders, save_run(tmp_path / "d", train(1))])
    found = [(chart.title, sorted({curve.label[0] for curve in chart.curves})) for chart in list_charts(runs)]
    losses, texts = [["a", "b", "d"], ["c"]], [["a"], ["b"], ["c"]]
    assert [names for title, names in found if title == "Loss"] == losses
    assert [names for title, names in found if title == "ROUGE-L"] == texts
    assert [names for title, names in found if title == "Learning rate"] == [["a", "b", "c", "d"]]
    assert len({curve.color for chart in list_charts(runs) for curve in chart.curves}) == 4, "a run has one colour"
    assert describe_unlike(runs) == (
        "The figures of a, b, d and of c were measured on other rows: they do not compare, and share no axis."
    )
    assert describe_unlike(runs[:2]) == (
        "The figures of a and of b are of texts generated with other settings: they do not compare, and share no axis."
    )
    assert describe_unlike([runs[0], runs[3]]) == describe_unlike(runs[3:]) == ""


def test_a_line_of_no_step_is_left_out(tmp_path: Path) -> None:
    steps, kinds = [10**400, -1, True, "3", 1.5, None, [1], 2**60], ["train", "eval", "checkpoint", "baseline"]
    wrong = [{**evaluation(1, loss=7.0), "kind": kind, "step": step} for step in steps for kind in kinds]
    run = save_run(tmp_path / "run", train(1), evaluation(1, loss=2.0), *wrong, *({**train(2), "kind": [kind]} for kind in kinds))
    assert [line["step"] for line in read_runs([run])[0].lines] == [1, 1]
    assert b"report" in render_page(read_runs([run]))


@pytest.mark.parametrize("value", [10**400, math.nan, "2.0", True, [2.0]], ids=lambda v: str(v)[:5])
def test_a_value_that_is_no_number_is_not_drawn(tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", train(1), train(2, value), evaluation(1, loss=2.0), evaluation(2, loss=value))
    [chart] = [chart for chart in list_charts(read_runs([run])) if chart.title == "Loss"]
    assert [curve.steps for curve in chart.curves] == [[1], [1]]
    assert b"<td class=number>2.00</td>" in render_page(read_runs([run]))
    show_runs([run])
    table = capsys.readouterr().out.split("\n\n")[1]
    assert [line.split()[-1] for line in table.splitlines()] == ["loss", "2.00", "–"]
