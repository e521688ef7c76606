"""The picture of a run's curves."""

from __future__ import annotations

import pytest

from toolkit.tracking import curves
from toolkit.tracking.curves import draw_curves

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn_titles(monkeypatch):
    """Titles of the panels drawn, in order."""
    titles = []
    tidy = curves._tidy
    monkeypatch.setattr(curves, "_tidy", lambda axes: (titles.append(axes.get_title()), tidy(axes)))
    return titles


def test_baselines_are_lines_and_no_cell_is_empty(tmp_path, monkeypatch):
    drawn = []
    tidy = curves._tidy
    monkeypatch.setattr(curves, "_tidy", lambda axes: (drawn.append(axes), tidy(axes)))
    train = [{"kind": "train", "step": step, "loss": 2.0, "learning_rate": 1e-3} for step in (1, 2)]
    measured = [{"step": 2, "loss": 3.0, "rougeL": 8.0, "measured_on": {"rows": rows}} for rows in "ba"]
    named = [{"kind": "baseline", "name": f"lead of {line['measured_on']['rows']}", **line} for line in measured]
    draw_curves([*train, *({"kind": "eval", **line} for line in measured), *named], tmp_path / "curves.png")
    assert [text.get_text() for text in drawn[1].get_legend().get_texts()] == ["ROUGE-L", "ROUGE-L, lead of a"]
    assert [axes.get_subplotspec().colspan for axes in drawn] == [range(1), range(1, 2), range(2)]


@pytest.mark.parametrize("name", ["costs $5 or $^$", "$\\frac{$", "\ud800\n\x1b[2J"])
def test_a_baseline_may_have_any_text_in_its_name(tmp_path, name):
    lines = [
        {"kind": "eval", "step": 1, "loss": 1.0, "rougeL": 1.0, "measured_on": {}},
        {"kind": "baseline", "step": 1, "name": name, "rougeL": 2.0, "measured_on": {}},
    ]
    draw_curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_all_panels(tmp_path, drawn_titles):
    train = [
        {"kind": "train", "step": s, "loss": 9 / s, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_s": 5e3}
        for s in range(1, 60)
    ]
    evaluations = [{"kind": "eval", "step": s, "loss": 3.0, "rouge1": 10.0, "rougeL": 8.0} for s in (0, 30)]
    draw_curves([*train, *evaluations, {"kind": "checkpoint", "step": 30}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_MAGIC)
    assert drawn_titles == [
        "Loss (log scale)",
        "ROUGE on held-out rows",
        "Learning rate",
        "Gradient norm before clipping (log scale)",
        "Speed",
    ]


def test_only_panels_with_data_and_without_what_was_not_finite(tmp_path, drawn_titles):
    lines = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "train", "step": 2, "loss": None, "loss_is": "nan"}]
    draw_curves(lines, tmp_path / "curves.png")
    assert drawn_titles == ["Loss (log scale)"]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_no_data_no_picture(tmp_path):
    draw_curves([{"kind": "checkpoint", "step": 1}], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_loss_of_zero_is_drawn_on_a_linear_scale(tmp_path, drawn_titles):
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate([1.0, 0.0])]
    draw_curves(lines, tmp_path / "curves.png")
    assert drawn_titles and (tmp_path / "curves.png").exists()


def test_smoothing_is_centred_and_keeps_short_curves():
    assert curves._smoothed([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    line = [float(i) for i in range(100)]  # A window of 5 leaves a straight line as it is, but for its ends.
    assert curves._smoothed(line)[2:-2] == line[2:-2]
    assert curves._smoothed([0.0] * 50 + [40.0] + [0.0] * 49)[50] == pytest.approx(8.0)
