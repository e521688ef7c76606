"""Draws a comparison of presets: bars of time, speed and memory, and their loss curves in one panel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.tools.compare.table import Figures
from toolkit.tools.report.charts import COLORS, Chart, Curve
from toolkit.tools.report.picture import draw_chart, save_picture

_DASHES = ("solid", "dashed", "dashdot", "dotted")
"""Of loss curves, so that equal ones stay visible."""


def draw_comparison(ran: Mapping[str, Figures], title: str, picture_path: Path) -> None:
    """Draw the presets that ran as a PNG, each in one colour in all panels. If none ran, write no picture."""
    if not ran:
        return
    of = list(ran.values())
    names = [re.sub(r"[:+]", lambda mark: f"{mark[0]}\n", preset) for preset in ran]  # each change on a line of its own
    colors = [COLORS[place % len(COLORS)] for place in range(len(of))]
    bars = [
        (f"Time of {of[0].num_timed_steps} steps, s", "{:.3g}", [figures.loop_s for figures in of]),
        (f"Speed, {of[0].unit}", "{:,.0f}", [figures.speed for figures in of]),
        ("Peak memory of a rank, GiB", "{:.2f}", [figures.peak_memory_gib for figures in of]),
    ]
    curves = []
    for place, (preset, figures) in enumerate(ran.items()):
        points = sorted((step, loss) for step, loss in figures.losses.items() if loss is not None)
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        curves.append(Curve(preset, colors[place], steps, losses, _DASHES[place % len(_DASHES)]))

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, 2)
        for axes, (heading, form, values) in zip(panels.flat[:3], bars, strict=True):
            axes.bar_label(axes.barh(names, values, color=colors, height=0.62), fmt=form, padding=4, fontsize=8)
            axes.set_title(heading)
            axes.set_xlim(0, 1.22 * max(values) or 1)
            axes.invert_yaxis()  # the first on top
            axes.tick_params(axis="y", length=0)
        panels[0, 1].set_yticks([])
        draw_chart(panels[1, 1], Chart("Training loss", "", curves), has_legend=False)  # the bars have names and colours

    save_picture(picture_path, title, (10, 2 * (1.3 + 0.42 * len(ran)) + 0.6), draw)
