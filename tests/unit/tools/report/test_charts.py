"""Each curve, in the page and in the picture of a run, has the figure and the steps that it is named after."""

import math

import pytest

from tests.support.report_runs import evaluation, save_distinct_run, save_run, train
from toolkit.tools.report import page
from toolkit.tools.report.charts import NUM_BUCKETS, Curve, list_charts, means, table_rows, thinned
from toolkit.tools.report.facts import describe_unlike, read_runs
from toolkit.tools.report.page import draw_curves, render_page

STEPS, EVALUATED = [1, 2, 3, 4, 5, 6], [2, 4, 6]


def test_curves_and_marks_are_those_of_their_names(tmp_path):
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


WRONG = [{"measured_on": of} for of in ("x", 5, {"sets": ["news"]}, {"sets": "news"})]
WRONG += [{"step": step} for step in (10**400, -1, True, "3", 1.5, None, [1], 2**60)]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:30])
def test_a_line_that_does_not_say_what_it_is_of_is_left_out(tmp_path, wrong):
    kinds = ["train", "eval", "checkpoint", "baseline", ["train"]] if "step" in wrong else ["eval"]
    lines = [evaluation(0, loss=2.0), train(1, grad_norm=0.0), train(2)]
    lines += [{**evaluation(1, loss=1.0), "kind": kind, **wrong} for kind in kinds]
    (run,) = read_runs([save_run(tmp_path / "run", *lines)])
    assert run.evaluations == lines[:1] and run.lines[:3] == lines[:3] and render_page([run])
    assert len(run.lines) == 3 or "measured_on" in wrong
    [chart] = [chart for chart in list_charts([run]) if chart.title == "Gradient norm"]
    assert not chart.is_log and "log" not in chart.unit, "it has a zero"


def test_sets_share_the_charts_of_their_run_and_have_none_beside_other_runs(tmp_path):
    of_sets = {"news/loss": 3.0, "mail/loss": 1.0, "measured_on": {"rows": "0", "sets": {"news": "1", "mail": "2"}}}
    folders = [save_run(tmp_path / name, evaluation(0, loss=2.0, **of_sets)) for name in ("a", "b")]
    for shown, labels in ((folders[:1], ["evaluation", "news", "mail"]), (folders, ["a: evaluation", "b: evaluation"])):
        (chart,) = list_charts(read_runs(shown))
        assert [curve.label for curve in chart.curves] == labels


def test_a_long_curve_is_drawn_by_its_extremes_and_means():
    values = [float(i % 10) for i in range(5000)]
    values[1234], values[4321] = 99.0, -99.0
    steps, kept = thinned(range(5000), values)
    assert len(steps) <= 2 * NUM_BUCKETS + 2 and steps == sorted(steps) and steps[0] == 0 and steps[-1] == 4999
    assert all(values[step] == value for step, value in zip(steps, kept, strict=True)) and {99.0, -99.0} <= set(kept)
    curve = Curve("", "", list(range(10, 130)), [float(step % 2) for step in range(10, 130)])
    assert table_rows(curve)[:2] == [("10 to 11", "0 to 1, mean 0.5"), ("12 to 13", "0 to 1, mean 0.5")]
    steps, averaged = means(Curve("", "", curve.steps, [3.0] * 120))
    assert len({*means(Curve("", "", curve.steps, [0.1] * 120))[1]}) == 1, "a constant has constant means"
    assert steps[0] == 10 and steps[-1] == 129 and averaged == pytest.approx([3.0] * len(steps))


def test_figures_of_other_rows_share_no_axis(tmp_path):
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


def test_losses_of_pairs_with_other_settings_share_no_axis_and_their_texts_do(tmp_path):
    of_runs = {name: {"rows": "1", "num_beams": 1, "loss": {"loss": name}} for name in ("sigmoid", "simpo")}
    figures = {"loss": 2.0, "rewards/margins": 1.0, "rougeL": 9.0}
    runs = read_runs(
        [save_run(tmp_path / name, train(1), evaluation(1, **figures, measured_on=of)) for name, of in of_runs.items()]
    )
    titles = [chart.title for chart in list_charts(runs)]
    assert [titles.count(title) for title in ("Loss", "Rewards/margins", "ROUGE-L")] == [2, 2, 1], titles
    assert describe_unlike(runs) == (
        "The losses and rewards of sigmoid and of simpo have other settings of the loss: they do not compare, and share no axis."
    )


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes that are drawn, in order."""
    axes = []
    draw = page.draw_chart
    monkeypatch.setattr(page, "draw_chart", lambda ax, chart: (axes.append(ax), draw(ax, chart)))
    return axes


def test_the_picture_has_the_charts_of_the_report(tmp_path, drawn):
    """Each curve with its own values, and each mark at its steps."""
    [facts] = read_runs([save_distinct_run(tmp_path / "run")])
    draw_curves(facts.lines, facts.folder / "curves.png")
    assert (facts.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    charts = list_charts([facts])
    assert [axes.get_title() for axes in drawn] == [chart.title for chart in charts]
    for axes, chart in zip(drawn, charts, strict=True):
        lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
        shown = {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()}
        shown_means = {curve.label: means(curve) if curve.is_noisy else (curve.steps, curve.values) for curve in chart.curves}
        assert shown == shown_means
        assert axes.get_yscale() == ("log" if chart.is_log else "linear")
        legend = [text.get_text() for text in axes.get_legend().get_texts()] if len(lines) > 1 else []
        assert legend == (list(lines) if len(lines) > 1 else [])
        marked = [[segment[0][0] for segment in lines.get_segments()] for lines in axes.collections]
        assert marked == [[2, 4, 6], [3], [5]], "checkpoints, a skipped update, a resume"


@pytest.mark.parametrize("name", ["costs $5 or $^$", "$\\frac{$", "\ud800\n\x1b[2J"])
def test_names_may_have_any_text(tmp_path, name, drawn):
    baseline = {"kind": "baseline", "step": 1, "name": name, "rougeL": 2.0, "measured_on": {"rows": "a"}}
    folder = tmp_path / "$\\run{$"
    folder.mkdir()
    draw_curves([evaluation(1, rougeL=1.0, **{"mine/$x^$": 2.0}), baseline], folder / "curves.png")
    assert (folder / "curves.png").stat().st_size > 1000 and len(drawn) == 2


def test_only_charts_with_data_and_without_what_was_not_finite_or_is_no_step(tmp_path, drawn):
    points = [(1, 2.0), (2, None), ("3", 2.0), (4, 0.0), (5, 10**400), (6, math.nan), (7, "2.0"), (8, True), (9, [2.0])]
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in points]
    draw_curves(lines, tmp_path / "curves.png")
    assert [(axes.get_title(), axes.get_yscale()) for axes in drawn] == [("Loss", "linear")]
    assert [list(line.get_xdata()) for line in drawn[0].get_lines()] == [[1, 4]] * 2
    draw_curves([{"kind": "checkpoint", "step": 1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_there_is_no_picture_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "toolkit")
    monkeypatch.setattr(page, "find_spec", lambda _: None)
    draw_curves([train(1)], tmp_path / "curves.png")
    assert caplog.messages == ["curves.png is not drawn, as matplotlib is not installed: pip install 'shardtune[pictures]'"]
    assert not (tmp_path / "curves.png").exists()
