"""Draws a comparison of presets: bars of their costs, and their loss curves in one panel."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.tools.compare.table import Outcome, find_reference, loss_difference, name_difference
from toolkit.tools.report.charts import COLORS, Chart, Curve
from toolkit.tools.report.picture import draw_chart, save_picture

_DASHES = ("solid", "dashed", "dashdot", "dotted")
"""Of loss curves, so that equal ones stay visible."""
_SMALLEST_DIFFERENCE = 1e-9
"""Smaller differences of the loss are drawn as none."""


def draw_comparison(outcomes: Sequence[Outcome], title: str, picture_path: Path) -> None:
    """Draw the presets that ran as a PNG, each in one colour in all panels. If none ran, write no picture."""
    reference = find_reference(outcomes)
    if reference is None or reference.figures is None:
        return
    first = reference.figures
    ran = {outcome.preset: outcome.figures for outcome in outcomes if outcome.figures}
    curves = []
    for place, (preset, figures) in enumerate(ran.items()):
        steps = sorted(step for step, loss in figures.losses.items() if loss is not None)
        losses = [figures.losses[step] or 0.0 for step in steps]
        curves.append(Curve(preset, _color(place), steps, losses, _DASHES[place % len(_DASHES)]))

    def draw(figure: Any) -> None:
        panels, of = figure.subplots(2, 3, squeeze=False), list(ran.values())
        _draw_bars(panels[0, 0], f"Time of {first.num_timed_steps} steps, s", ".3g", [f.loop_s for f in of])
        _draw_bars(panels[0, 1], f"Speed, {first.unit}", ",.0f", [f.speed for f in of])
        _draw_bars(panels[0, 2], "Peak memory of a rank, GiB", ".2f", [f.peak_memory_gib for f in of])
        stands, waits = [f.save_stands_s or 0.0 for f in of], [f.save_waits_s or 0.0 for f in of]
        _draw_bars(panels[1, 0], "Saving, s (dark: training waits)", ".3g", stands, waits)
        differences, words = [loss_difference(f, first) for f in of], [name_difference(f, first) for f in of]
        _draw_bars(panels[1, 1], "Largest relative difference of the loss", "", differences, words=words)
        panels[1, 1].set_xscale("symlog", linthresh=_SMALLEST_DIFFERENCE)  # they span many orders of magnitude
        panels[1, 1].set(xlim=(0, 1e4), xticks=[0, 1e-6, 1e-3, 1])
        panels[1, 1].xaxis.set_major_formatter("{x:g}")
        draw_chart(panels[1, 2], Chart("Training loss", "", curves), has_legend=False)  # the bars have names and colours
        for axes in panels[:, 0]:
            axes.set_yticks(range(len(ran)), [_wrapped(preset) for preset in ran])

    save_picture(picture_path, title, (12.5, 2 * (1.3 + 0.42 * len(ran)) + 0.6), draw)


def _draw_bars(
    axes: Any, title: str, form: str, values: list[float], parts: Sequence[float] = (), words: Sequence[str] = ()
) -> None:
    """Draw a bar per preset, the first on top, with its value in `form`, or in `words`. A part of it is dark, if
    `parts` are given."""
    from matplotlib.ticker import MaxNLocator

    places, ends = range(len(values)), [value if math.isfinite(value) else 1.0 for value in values]
    colors = [_color(place) for place in places]
    axes.barh(places, ends, color=colors, height=0.62, alpha=0.35 if parts else 1.0)
    if parts:
        axes.barh(places, parts, color=colors, height=0.62)
    for place, end, value in zip(places, ends, values, strict=True):
        text = words[place] if words else format(value, form)
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # small times have long labels
    axes.set_xlim(0, 1.22 * max(ends) or 1)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_yticks(places, [""] * len(values))
    axes.tick_params(axis="y", length=0)


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _wrapped(preset: str) -> str:
    """The name of a preset, with each of its changes on a line of its own."""
    return re.sub(r"[:+]", lambda mark: f"{mark[0]}\n", preset)
