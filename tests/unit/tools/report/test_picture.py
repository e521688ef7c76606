"""The picture of a run's curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.report_runs import evaluation, save_distinct_run
from toolkit.tools.report import picture
from toolkit.tools.report.charts import list_charts
from toolkit.tools.report.facts import read_runs
from toolkit.tools.report.picture import draw_curves


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes that are drawn, in order."""
    axes: list[Any] = []
    draw = picture.draw_chart
    monkeypatch.setattr(picture, "draw_chart", lambda ax, chart: (axes.append(ax), draw(ax, chart)))
    return axes


def test_the_picture_has_the_charts_of_the_report(tmp_path: Path, drawn: list[Any]) -> None:
    """Each curve with its own values, and each mark at its steps."""
    [facts] = read_runs([save_distinct_run(tmp_path / "run")])
    draw_curves(facts.lines, facts.folder / "curves.png")
    assert (facts.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    charts = list_charts([facts])
    assert [axes.get_title() for axes in drawn] == [chart.title for chart in charts]
    for axes, chart in zip(drawn, charts, strict=True):
        lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
        shown = {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()}
        means = {curve.label: picture.means(curve) if curve.is_noisy else (curve.steps, curve.values) for curve in chart.curves}
        assert shown == means
        assert axes.get_yscale() == ("log" if chart.is_log else "linear")
        legend = [text.get_text() for text in axes.get_legend().get_texts()] if len(lines) > 1 else []
        assert legend == (list(lines) if len(lines) > 1 else [])
        marked = [[segment[0][0] for segment in lines.get_segments()] for lines in axes.collections]
        assert marked == [[2, 4, 6], [3], [5]], "checkpoints, a skipped update, a resume"


@pytest.mark.parametrize("name", ["costs $5 or $^$", "$\\frac{$", "\ud800\n\x1b[2J"])
def test_names_may_have_any_text(tmp_path: Path, name: str, drawn: list[Any]) -> None:
    baseline = {"kind": "baseline", "step": 1, "name": name, "rougeL": 2.0, "measured_on": {"rows": "a"}}
    folder = tmp_path / "$\\run{$"
    folder.mkdir()
    draw_curves([evaluation(1, rougeL=1.0, **{"mine/$x^$": 2.0}), baseline], folder / "curves.png")
    assert (folder / "curves.png").stat().st_size > 1000 and len(drawn) == 2


def test_only_charts_with_data_and_without_what_was_not_finite_or_is_no_step(tmp_path: Path, drawn: list[Any]) -> None:
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 2.0), (2, None), ("3", 2.0), (4, 0.0))]
    draw_curves(lines, tmp_path / "curves.png")
    assert [(axes.get_title(), axes.get_yscale()) for axes in drawn] == [("Loss", "linear")]
    assert [list(line.get_xdata()) for line in drawn[0].get_lines()] == [[1, 4]] * 2


def test_no_data_no_picture(tmp_path: Path) -> None:
    draw_curves([{"kind": "checkpoint", "step": 1}], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
