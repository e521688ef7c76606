"""The curves of one run or several: what is drawn, and the bokeh figures that draw it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.evaluation.rows import even_places, split_metric
from toolkit.tools.report.facts import RunFacts, group_alike, speed_unit
from toolkit.tools.report.sections import Table

NUM_BUCKETS = 500
"""Of a longer curve, the lowest and the highest value of each bucket of steps are drawn."""
MOST_TABLE_ROWS = 60
"""Of a curve's data table; more steps are shown as ranges, with lowest, mean and highest value."""
MOST_MARKS = 200
COLORS = ("#3d7edb", "#dd6b20", "#2e9e62", "#a463c9", "#c2921a", "#2fa3ad", "#d5528b", "#80868f")
EVALUATION_COLOR = "#dd6b20"
BASELINE_DASHES = ("dotted", "dashdot", "dashed")
MARKS = {
    "checkpoint": ("checkpoint", "#80868f", "dotted"),
    "skip": ("skipped update", "#e03131", "solid"),
    "resume": ("resume", "#a463c9", "dashed"),
}
"""Name, colour and dash of a vertical line, by the kind of the lines of metrics.jsonl."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    color: str
    steps: list[int]
    values: list[float]
    dash: str = "solid"
    has_points: bool = False
    is_noisy: bool = False
    """Drawn faint, with its mean over a window on top."""


@dataclass(frozen=True)
class Chart:
    """One chart, and what is beside it for readers who do not see it."""

    title: str
    unit: str
    curves: list[Curve]
    is_log: bool = False
    marks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(kind, steps) of vertical lines."""

    @property
    def description(self) -> str:
        """The chart in a sentence."""
        parts = [
            f"{curve.label}: from {curve.values[0]:.4g} at step {curve.steps[0]:,} to {curve.values[-1]:.4g} at step "
            f"{curve.steps[-1]:,}, lowest {min(curve.values):.4g}, highest {max(curve.values):.4g}"
            for curve in self.curves
        ]
        return f"{self.title} ({self.unit}). {'; '.join(parts)}."

    def tables(self) -> list[Table]:
        """Its figures: a table for each curve, and one of the marks."""
        curves = [Table([("step", self.unit), *table_rows(curve)], caption=curve.label) for curve in self.curves]
        marks = [(MARKS[kind][0], ", ".join(f"{step:,}" for step in steps)) for kind, steps in self.marks]
        return [*curves, Table([("mark", "after steps"), *marks], left=(0, 1))]


def list_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """The charts that these runs have figures for: losses, each metric with its baselines, then how training went."""
    names = [name for run in runs for name in run.metric_names if name != "perplexity" and not split_metric(name, run.sets)[0]]
    charts = []
    for name in dict.fromkeys(("loss", *names)):  # figures of other rows have an axis of their own
        charts += [_evaluation_chart(group, name) for group in group_alike(runs, name)]
    charts += [
        _training_chart(runs, "learning_rate", "Learning rate", "per update"),
        _training_chart(runs, "grad_norm", "Gradient norm", "L2, before clipping, log scale", is_noisy=True, is_log=True),
        _training_chart(runs, "tokens_per_s", "Speed", f"{speed_unit(runs[0].lines)} without padding", is_noisy=True),
        _training_chart(runs, "step_time_s", "Step time", "seconds", is_noisy=True),
        _training_chart(runs, "peak_memory_gib", "Peak memory", "GiB on the rank with most"),
        _training_chart(runs, "router_aux_loss", "Auxiliary loss of the routers", "times its coefficient", is_noisy=True),
        _training_chart(runs, "router_busiest_share", "Busiest expert", "share of tokens, of all layers", is_noisy=True),
        _training_chart(runs, "router_load_entropy", "Load of the experts", "entropy: 1 is even, mean of layers", is_noisy=True),
    ]
    return [chart for chart in charts if chart.curves]


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The points to draw: all, or the lowest and the highest of each of `NUM_BUCKETS` buckets, so that no spike is lost."""
    if len(steps) <= 2 * NUM_BUCKETS:
        return list(steps), list(values)
    array = np.asarray(values)
    kept = {0, len(steps) - 1}
    for places in np.array_split(np.arange(len(steps)), NUM_BUCKETS):
        kept |= {int(places[array[places].argmin()]), int(places[array[places].argmax()])}
    chosen = sorted(kept)
    return [steps[place] for place in chosen], [values[place] for place in chosen]


def table_rows(curve: Curve) -> list[tuple[str, str]]:
    """(step or steps, value or lowest to highest with the mean), at most `MOST_TABLE_ROWS`."""
    if len(curve.steps) <= MOST_TABLE_ROWS:
        return [(f"{step:,}", f"{value:.6g}") for step, value in zip(curve.steps, curve.values, strict=True)]
    rows = []
    for places in np.array_split(np.arange(len(curve.steps)), MOST_TABLE_ROWS):
        part = [curve.values[place] for place in places]
        span = f"{curve.steps[places[0]]:,} to {curve.steps[places[-1]]:,}"
        rows.append((span, f"{min(part):.5g} to {max(part):.5g}, mean {sum(part) / len(part):.5g}"))
    return rows


def draw(chart: Chart) -> dict[str, Any]:
    """The chart as the JSON that bokeh's script shows. Its labels are ours or text that bokeh escapes."""
    from bokeh.embed import json_item
    from bokeh.models import BasicTickFormatter, BoxZoomTool, HoverTool, NumeralTickFormatter, ResetTool
    from bokeh.plotting import figure

    plot = figure(
        height=250,
        sizing_mode="stretch_width",
        y_axis_type="log" if chart.is_log else "linear",
        tools=[BoxZoomTool(), ResetTool()],
        active_drag=None,  # or a finger could not scroll past a chart
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.axis_label = "step"
    plot.xgrid.visible = False
    # Bokeh would write 0.0005 as 5.000e-4, and on a logarithmic axis 5 as 10¹ when 5 is its only tick.
    plot.yaxis.formatter = BasicTickFormatter(power_limit_low=-6, power_limit_high=9)
    values = {value for curve in chart.curves for value in curve.values}
    if values == {0}:
        plot.y_range.update(start=0)  # bokeh would put a line of zeros into the middle
    elif len(values) == 1 and not chart.is_log:
        plot.y_range.update(default_span=abs(*values))  # bokeh would show 2 units, and 0.001 in them as 0
    hovered: list[Any] = []
    for curve in chart.curves:
        points = _as_data(*thinned(curve.steps, curve.values))
        style: dict[str, Any] = {"color": curve.color, "line_dash": curve.dash}
        line = plot.line("step", "value", source=points, name=curve.label, alpha=0.35 if curve.is_noisy else 1, **style)
        if curve.is_noisy:
            plot.line("step", "value", source=_as_data(*means(curve)), line_width=2.2, **style)
        else:
            line.glyph.line_width = 2
        if curve.has_points:
            plot.scatter("step", "value", source=points, size=6, color=curve.color)
        hovered.append(line)
    plot.add_tools(HoverTool(renderers=hovered, tooltips=[("step", "@step{0,0}"), ("value", "@value{0.[000000]}")], mode="vline"))
    for kind, steps in chart.marks:
        _, color, dash = MARKS[kind]
        plot.vspan(x=list(steps), color=color, line_dash=dash, line_width=1.2, line_alpha=0.6, level="underlay")
    return dict(json_item(plot))


def _evaluation_chart(runs: Sequence[RunFacts], name: str) -> Chart:
    """A figure of the evaluations, with its baselines; the loss beside that of training."""
    curves, first, is_loss = [], runs[0], name == "loss"
    for run in runs:
        color, dash = _color(run), "solid"
        if is_loss:
            curves.append(Curve(f"{run.prefix}training", color, *run.series("train", name), is_noisy=True))
            color, dash = (color, "dashed") if run.prefix else (EVALUATION_COLOR, "solid")
        label = run.name if run.prefix and not is_loss else f"{run.prefix}evaluation"
        curves.append(Curve(label, color, *run.series("eval", name), dash, has_points=True))
        # Each evaluation set of the only run of a page; those of several runs are in tables alone.
        for place, of_set in enumerate([] if run.prefix else run.sets):
            color = COLORS[2 + place % (len(COLORS) - 2)]  # the first two are of training and evaluation
            curves.append(Curve(of_set, color, *run.series("eval", f"{of_set}/{name}"), has_points=True))
        if run.baselines and run.baselines == first.baselines and run is not first:
            continue  # drawn once
        for place, (baseline, figures) in enumerate(run.baselines.items()):
            if name in figures:
                ends = [0, max(1, run.last_step)]
                dash = BASELINE_DASHES[place % len(BASELINE_DASHES)]
                curves.append(Curve(f"{run.prefix}{baseline}", "#80868f", ends, [figures[name]] * 2, dash))
    if is_loss:
        return _chart("Loss", "nats per label token, log scale", curves, runs, is_log=True)
    is_percent = name.startswith(("rouge", "percent_", "token_accuracy", "accuracy", "exact_match"))
    unit = "percent" if is_percent else "bits" if name == "bits_per_byte" else "of the evaluation"
    title = name.removeprefix("percent_").replace("_", " ").replace("rouge", "ROUGE-")
    return _chart(title[:1].upper() + title[1:], unit, curves, runs)


def _training_chart(
    runs: Sequence[RunFacts], name: str, title: str, unit: str, *, is_noisy: bool = False, is_log: bool = False
) -> Chart:
    labels = [run.name if run.prefix else title.lower() for run in runs]
    figures = [run.series("train", name) for run in runs]
    curves = [Curve(label, _color(run), *of, is_noisy=is_noisy) for run, label, of in zip(runs, labels, figures, strict=True)]
    return _chart(title, unit, curves, runs, is_log=is_log)


def _chart(title: str, unit: str, curves: list[Curve], runs: Sequence[RunFacts], *, is_log: bool = False) -> Chart:
    drawn = [curve for curve in curves if curve.steps]
    is_positive = all(value > 0 for curve in drawn for value in curve.values)
    unit = unit if is_positive else unit.removesuffix(", log scale")
    marks = []
    for kind in () if runs[0].prefix else MARKS:  # of a page with one run
        if steps := sorted({line["step"] for line in runs[0].lines if line["kind"] == kind}):
            marks.append((kind, tuple(steps[i] for i in even_places(len(steps), MOST_MARKS))))
    return Chart(title, unit, drawn, is_log and is_positive, tuple(marks))


def _color(run: RunFacts) -> str:
    return COLORS[run.place % len(COLORS)]


def means(curve: Curve) -> tuple[list[int], list[float]]:
    """Steps and means over a centred window of about a twentieth of the curve, at 200 places at most."""
    values = np.asarray(curve.values)
    reach = max(1, len(values) // 40) if len(values) > 2 else 0
    total = np.concatenate([[0.0], np.cumsum(values)])
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), 200)).astype(int))
    first, end = np.maximum(0, places - reach), np.minimum(len(values), places + reach + 1)
    averaged = (total[end] - total[first]) / (end - first)
    return [curve.steps[place] for place in places], [_rounded(value) for value in averaged.tolist()]


def _as_data(steps: Sequence[float], values: Sequence[float]) -> dict[str, list[float]]:
    return {"step": list(steps), "value": [_rounded(value) for value in values]}


def _rounded(value: float) -> float:
    """7 digits: a constant figure stays one through its means."""
    return float(f"{value:.7g}") if math.isfinite(value) else math.nan
