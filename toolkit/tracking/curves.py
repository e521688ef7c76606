"""Draws the curves of a run from its `metrics.jsonl`, as one small picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, one_line
from toolkit.evaluation.generate import BASELINE
from toolkit.files.durable import written_beside
from toolkit.tracking.metrics_log import speed_unit

_INK, _ACCENT, _FAINT = "#1f5a91", "#d1602b", "#b9cbdd"
_ROUGE_LINES = {
    "rouge1": ("ROUGE-1", "#1f5a91", "-"),
    "rouge2": ("ROUGE-2", "#6f9fc8", "-"),
    "rougeL": ("ROUGE-L", "#d1602b", "-"),
    "rougeLsum": ("ROUGE-Lsum", "#f0c9b0", ":"),
}


def draw_curves(lines: list[dict[str, Any]], picture_path: Path) -> None:
    """Draw the lines of a `metrics.jsonl` as a PNG with panels for loss, ROUGE, accuracy, learning rate, gradient norm and speed.

    Panels without data are left out; without any panel, no picture is written.

    Raises:
        UserError: the picture cannot be written; an older one stays as it was.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [draw for draw, kind, names in _PANELS if any(_series(lines, kind, name)[0] for name in names)]
    if not panels:
        return
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(5.2 * num_columns, 2.9 * num_rows + 0.4), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12))
    figure.suptitle(picture_path.resolve().parent.name, fontsize=12, fontweight="bold")
    for position, draw in enumerate(panels, start=1):
        is_alone = num_columns == 2 and position == len(panels) and position % 2 == 1
        axes = figure.add_subplot(num_rows, num_columns, (position, position + 1) if is_alone else position)
        draw(axes, lines)
        _tidy(axes)
    # A canvas instead of pyplot needs no display and no global state.
    try:
        with written_beside(picture_path) as beside:
            FigureCanvasAgg(figure).print_png(beside)
    except OSError as error:
        raise UserError(
            f"{picture_path} could not be written ({error.strerror}): make room there; everything else of the run is written"
        ) from None


def _draw_loss(axes: Any, lines: list[dict[str, Any]]) -> None:
    steps, losses = _series(lines, "train", "loss")
    _draw_smoothed(axes, steps, losses, "training")
    eval_steps, eval_losses = _series(lines, "eval", "loss")
    axes.plot(eval_steps, eval_losses, color=_ACCENT, marker="o", markersize=4, label="held-out")
    axes.set(title="Loss (log scale)", ylabel="nats per label token")
    _log_scale(axes, _smoothed(losses) + eval_losses)
    axes.legend(frameon=False, fontsize=8)


def _draw_rouge(axes: Any, lines: list[dict[str, Any]]) -> None:
    for name, (label, color, style) in _ROUGE_LINES.items():
        steps, values = _series(lines, "eval", name)
        if steps:
            axes.plot(steps, values, color=color, linestyle=style, marker="o", markersize=4, label=label)
    measured_on = [line.get("measured_on") for line in lines if line["kind"] == "eval"][-1]
    baselines = [line for line in lines if line["kind"] == BASELINE and line.get("measured_on") == measured_on]
    for line, style in zip(baselines, ("--", ":", "-."), strict=False):
        name = one_line(line["name"][:24]).replace("$", r"\$")  # between two of them would be a formula
        axes.axhline(line["rougeL"], color="#80868f", linewidth=1, linestyle=style, label=f"ROUGE-L, {name}")
    axes.set(title="ROUGE on held-out rows", ylabel="F-measure, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _draw_accuracy(axes: Any, lines: list[dict[str, Any]]) -> None:
    axes.plot(*_series(lines, "eval", "accuracy"), color=_ACCENT, marker="o", markersize=4)
    axes.set(title="Accuracy on held-out images", ylabel="%")


def _draw_learning_rate(axes: Any, lines: list[dict[str, Any]]) -> None:
    axes.plot(*_series(lines, "train", "learning_rate"), color=_INK)
    axes.set(title="Learning rate", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _draw_grad_norm(axes: Any, lines: list[dict[str, Any]]) -> None:
    steps, norms = _series(lines, "train", "grad_norm")
    _draw_smoothed(axes, steps, norms)
    axes.set(title="Gradient norm before clipping (log scale)", ylabel="L2 norm")
    _log_scale(axes, norms)


def _draw_speed(axes: Any, lines: list[dict[str, Any]]) -> None:
    _draw_smoothed(axes, *_series(lines, "train", "tokens_per_s"))
    axes.set(title="Speed", ylabel=f"{speed_unit(lines)}, without padding")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")


# For each panel: how to draw it, and the kind and names of the figures that it needs.
_PANELS: list[tuple[Callable[[Any, list[dict[str, Any]]], None], str, list[str]]] = [
    (_draw_loss, "train", ["loss"]),
    (_draw_rouge, "eval", list(_ROUGE_LINES)),
    (_draw_accuracy, "eval", ["accuracy"]),
    (_draw_learning_rate, "train", ["learning_rate"]),
    (_draw_grad_norm, "train", ["grad_norm"]),
    (_draw_speed, "train", ["tokens_per_s"]),
]


def _series(lines: list[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one figure; lines where it is missing or not finite are left out."""
    points = [(line["step"], line[name]) for line in lines if line["kind"] == kind and line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(values: list[float]) -> list[float]:
    """Mean over a centred window of about a twentieth of the curve; centred, so that it does not lag."""
    reach = len(values) // 40
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_smoothed(axes: Any, steps: list[int], values: list[float], label: str | None = None) -> None:
    axes.plot(steps, values, color=_FAINT, linewidth=0.8)
    axes.plot(steps, _smoothed(values), color=_INK, linewidth=1.6, label=label)


def _log_scale(axes: Any, values: list[float]) -> None:
    """Set a log scale with plain numbers at its ticks, even if the values span less than a decade."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

    lowest, highest = min(values), max(values)
    if lowest <= 0:
        return
    axes.set_yscale("log")
    narrow = highest / lowest < 4
    ticks = FixedLocator(MaxNLocator(5).tick_values(lowest, highest)) if narrow else LogLocator(subs=(1, 2, 5))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _tidy(axes: Any) -> None:
    axes.set_xlabel("step", fontsize=9)
    axes.title.set(fontsize=10, fontweight="bold")
    axes.yaxis.label.set_size(9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
