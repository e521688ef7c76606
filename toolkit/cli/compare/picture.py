"""Draws a comparison of presets: bars of their costs, and their loss curves in one panel."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.cli.compare.table import Figures, Outcome, find_reference, loss_difference

_COLORS = ("#1f5a91", "#d1602b", "#5b9a6f", "#8a6bb0", "#c9a227", "#4aa3b5", "#a34a5e", "#7a7a7a")
_SMALLEST_DIFFERENCE = 1e-9
"""Left end of the panel of loss differences, where equal curves are drawn."""


def draw_comparison(outcomes: Sequence[Outcome], title: str, picture_path: Path) -> None:
    """Draw the presets that ran as a PNG, each in one colour in all panels. If none ran, write no picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    reference = find_reference(outcomes)
    if reference is None or reference.figures is None:
        return
    ran = {outcome.preset: outcome.figures for outcome in outcomes if outcome.figures}
    size = (12.5, 2 * (1.3 + 0.42 * len(ran)) + 0.6)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12))
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels = figure.subplots(2, 3, squeeze=False)
    first = reference.figures
    _draw_bars(panels[0, 0], ran, f"Time of {first.num_timed_steps} steps, s", ".3g", lambda f: f.loop_s)
    _draw_bars(panels[0, 1], ran, f"Speed, {first.unit}", ",.0f", lambda f: f.speed)
    _draw_bars(panels[0, 2], ran, "Peak memory of a rank, GiB", ".2f", lambda f: f.peak_memory_gib)
    save = "Saving, s (dark: training waits)"
    _draw_bars(panels[1, 0], ran, save, ".3g", lambda f: f.save_stands_s or 0.0, lambda f: f.save_waits_s or 0.0)
    _draw_differences(panels[1, 1], ran, reference.preset)
    _draw_losses(panels[1, 2], ran)
    for axes in panels.flat:
        _tidy(axes)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(ran)), [_wrapped(preset) for preset in ran])
    FigureCanvasAgg(figure).print_png(picture_path)


def _draw_bars(
    axes: Any,
    ran: dict[str, Figures],
    title: str,
    form: str,
    value_of: Callable[[Figures], float],
    part_of: Callable[[Figures], float] | None = None,
) -> None:
    """Draw a bar per preset with its value in `form`. With `part_of`, that part of the bar is dark and the rest light."""
    from matplotlib.ticker import MaxNLocator

    places, values = range(len(ran)), [value_of(figures) for figures in ran.values()]
    axes.barh(places, values, color=_colors(ran), height=0.62, alpha=0.35 if part_of else 1.0)
    if part_of:
        axes.barh(places, [part_of(figures) for figures in ran.values()], color=_colors(ran), height=0.62)
    for place, value in zip(places, values, strict=True):
        axes.annotate(format(value, form), (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # small times have long labels
    axes.set_xlim(0, 1.22 * max(values) or 1)
    _as_rows(axes, ran)


def _draw_differences(axes: Any, ran: dict[str, Figures], reference: str) -> None:
    """Draw loss differences on a log scale, because they span many orders of magnitude."""
    for place, (preset, figures) in enumerate(ran.items()):
        difference = loss_difference(figures, ran[reference])
        shown = min(max(difference, _SMALLEST_DIFFERENCE), 1.0) if math.isfinite(difference) else 1.0
        text = "reference" if preset == reference else f"{difference:.1e}" if difference else "equal"
        axes.plot([_SMALLEST_DIFFERENCE, shown], [place, place], color=_colors(ran)[place], linewidth=1.2)
        axes.plot([shown], [place], "o", color=_colors(ran)[place], markersize=6, clip_on=False)
        axes.annotate(text, (shown, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(_SMALLEST_DIFFERENCE, 100)
    axes.set_xticks([1e-9, 1e-6, 1e-3, 1])
    axes.minorticks_off()
    axes.set_title("Largest relative difference of the loss")
    _as_rows(axes, ran)


def _draw_losses(axes: Any, ran: dict[str, Figures]) -> None:
    """Draw the curves over each other, later ones thinner, so that equal ones stay visible."""
    for place, figures in enumerate(ran.values()):
        points = sorted((step, loss) for step, loss in figures.losses.items() if loss is not None)
        width = 1.2 + 1.4 * (len(ran) - 1 - place)
        axes.plot([step for step, _ in points], [loss for _, loss in points], color=_colors(ran)[place], linewidth=width)
    axes.set_title("Training loss by step")


def _as_rows(axes: Any, ran: dict[str, Figures]) -> None:
    axes.set_ylim(len(ran) - 0.5, -0.5)  # the first preset on top
    axes.set_yticks(range(len(ran)), [""] * len(ran))
    axes.tick_params(axis="y", length=0)


def _colors(ran: dict[str, Figures]) -> list[str]:
    return [_COLORS[place % len(_COLORS)] for place in range(len(ran))]


def _wrapped(preset: str) -> str:
    """The name of a preset, with each of its changes on a line of its own."""
    return re.sub(r"[:+]", lambda mark: f"{mark[0]}\n", preset)


def _tidy(axes: Any) -> None:
    axes.title.set(fontsize=10, fontweight="bold")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
