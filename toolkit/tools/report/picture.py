"""`curves.png`: the charts of a run as one small picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import one_line, refusal_named
from toolkit.files.durable import written_beside
from toolkit.tools.report.charts import MARKS, Chart, list_charts, means
from toolkit.tools.report.facts import RunFacts, lines_of_steps

NUM_COLUMNS = 3


def draw_curves(lines: list[dict[str, Any]], picture_path: Path) -> None:
    """Draw the charts of the lines of a `metrics.jsonl` as a PNG; without any chart, no picture is written. If it cannot be
    written, that is a `UserError`, and an older one stays as it was."""
    name = picture_path.resolve().parent.name
    charts = list_charts([RunFacts(picture_path.parent, name, lines_of_steps(lines))])
    if not charts:
        return
    num_rows = -(-len(charts) // NUM_COLUMNS)
    num_columns = min(NUM_COLUMNS, len(charts))

    def draw(figure: Any) -> None:
        for place, chart in enumerate(charts, start=1):
            draw_chart(figure.add_subplot(num_rows, num_columns, place), chart)

    way_out = "make room there; everything else of the run is written"
    with refusal_named(f"{picture_path} could not be written", way_out), written_beside(picture_path) as beside:
        save_picture(beside, name, (4.6 * num_columns, 2.7 * num_rows + 0.4), draw)


def save_picture(path: Path, title: str, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a PNG of `size` inches, with what `draw` puts into its figure."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context({"text.parse_math": False}):  # a name with two dollar signs is not a formula
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12))
        figure.suptitle(one_line(title), fontsize=12, fontweight="bold")
        draw(figure)
        for axes in figure.axes:
            axes.title.set(fontsize=10, fontweight="bold")
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, color="#e6e6e6", linewidth=0.6)
            axes.set_axisbelow(True)
        # A canvas instead of pyplot needs no display and no global state.
        FigureCanvasAgg(figure).print_png(path)


def draw_chart(axes: Any, chart: Chart, *, has_legend: bool = True) -> None:
    """Draw one chart, as `report.html` shows it."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for curve in chart.curves:
        steps, values = curve.steps, curve.values
        if curve.is_noisy:
            axes.plot(steps, values, color=curve.color, linewidth=0.8, alpha=0.35)
            steps, values = means(curve)
        marker = "o" if curve.has_points else None
        label = one_line(curve.label)
        axes.plot(steps, values, color=curve.color, linewidth=1.6, linestyle=curve.dash, marker=marker, markersize=4, label=label)
    if chart.is_log:
        axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    if chart.is_log:
        axes.yaxis.set_major_locator(MaxNLocator(5) if highest < 4 * lowest else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    for kind, marked in chart.marks:
        _, color, dash = MARKS[kind]
        axes.vlines(marked, lowest, highest, colors=color, linestyles=dash, linewidth=0.8, alpha=0.5, zorder=0)
    axes.set_ylim(lowest, highest)
    axes.set_title(one_line(chart.title))
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.margins(x=0.02)
    if has_legend and len(chart.curves) > 1:
        axes.legend(frameon=False, fontsize=7)
