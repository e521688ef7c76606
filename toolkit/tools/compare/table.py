"""Figures of a run under one preset, read from its `metrics.jsonl`; the table and the picture of several such runs."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import align
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.report.charts import COLORS, Chart, Curve, speed_unit
from toolkit.tools.report.page import can_draw, draw_chart, save_picture
from toolkit.tools.report.sections import number

METRICS = {"accuracy": "accuracy %", "rougeL": "ROUGE-L", "token_accuracy": "token accuracy %"}
"""Evaluation metrics with their column heads. The first that the runs have is shown beside the held-out loss."""
_DASHES = ("solid", "dashed", "dashdot", "dotted")
"""Of loss curves, so that equal ones stay visible."""


@dataclass(frozen=True)
class Figures:
    """Time, memory, losses, saves and evaluation of one run."""

    losses: dict[int, float | None]
    """Training loss by step; None if it was not finite."""
    num_timed_steps: int
    loop_s: float
    """Time of the timed steps, without the warm-up, evaluations and waiting for saves."""
    speed: float
    """Rows or tokens per second over all ranks in the timed steps; `unit` says which."""
    unit: str
    peak_memory_gib: float
    """Peak of the rank with most, from the start of its process to the last step, including evaluations in between."""
    save_waits_s: float | None
    """Time that training waits for a save, averaged over the saves; None without one."""
    save_stands_s: float | None
    """Time from the start of a save until the checkpoint is complete, averaged over the saves."""
    num_bytes: int | None
    """Size of the last save, summed over ranks."""
    evaluation: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """One preset: how it ran here, and its figures or the reason for its failure."""

    preset: str
    num_processes: int
    precision: str
    changes: list[str]
    """Changes to the preset's file, as in "num_processes 8 → 2"."""
    figures: Figures | None = None
    failure: str | None = None


def read_figures(metrics_path: Path, warmup_steps: int) -> Figures:
    """The figures of one run, without the times of its first `warmup_steps` steps; a `ValueError` if no step is left or the
    file is broken."""
    lines = load_json_lines(metrics_path, skip_torn_end=True)
    steps = [line for line in lines if line["kind"] == "train"]
    timed = [line for line in steps if line["step"] > warmup_steps]
    if not timed:
        raise ValueError(f"{metrics_path} holds no step after step {warmup_steps}")
    loop_s = sum(line["step_time_s"] for line in timed)
    saves = [(line["blocking_s"], line["write_s"], line["num_bytes"]) for line in lines if line["kind"] == "checkpoint"]
    # If training waited for the save, the write is part of the wait; else the thread started writing when training continued.
    stands_s = [waits_s if waits_s >= write_s else waits_s + write_s for waits_s, write_s, _ in saves]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    return Figures(
        losses={line["step"]: line["loss"] for line in steps},
        num_timed_steps=len(timed),
        loop_s=loop_s,
        speed=sum(line["num_tokens"] for line in timed) / loop_s,
        unit=speed_unit(lines),
        peak_memory_gib=max(line["peak_memory_gib"] for line in steps),
        save_waits_s=sum(waits_s for waits_s, _, _ in saves) / len(saves) if saves else None,
        save_stands_s=sum(stands_s) / len(saves) if saves else None,
        num_bytes=saves[-1][2] if saves else None,
        evaluation={name: evaluations[-1][name] for name in ("loss", *METRICS) if evaluations and name in evaluations[-1]},
    )


def loss_difference(figures: Figures, reference: Figures) -> float:
    """Largest relative difference of the training loss over the steps; infinite if only one of two losses is finite."""
    largest = 0.0
    for step in figures.losses.keys() & reference.losses.keys():
        loss, expected = figures.losses[step], reference.losses[step]
        if loss is not None and expected is not None:
            largest = max(largest, abs(loss - expected) / max(abs(expected), 1e-12))
        elif loss is not expected:
            largest = math.inf
    return largest


def presets_that_ran(outcomes: Sequence[Outcome]) -> dict[str, Figures]:
    """Their figures. The losses of the others are compared with those of the first."""
    return {outcome.preset: outcome.figures for outcome in outcomes if outcome.figures}


def common_changes(outcomes: Sequence[Outcome]) -> list[str]:
    """The changes that all presets share."""
    return [change for change in outcomes[0].changes if all(change in outcome.changes for outcome in outcomes)]


def format_comparison(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as an aligned Markdown table. Failures and the presets' own changes are in the last column."""
    ran = presets_that_ran(outcomes)
    reference = next(iter(ran.values()), None)
    unit = " or ".join(sorted({figures.unit for figures in ran.values()})) or "tokens/s"
    metrics = [name for name in METRICS if any(name in figures.evaluation for figures in ran.values())][:1]
    head = ["preset", "ranks", "precision", "loop s", unit, "peak GiB", "loss difference", "save waits s", "save stands s"]
    head += ["held-out loss", *(METRICS[name] for name in metrics), "remarks"]
    common, rows = common_changes(outcomes), [head, ["-", *["-:"] * (len(head) - 2), "-"]]
    for outcome in outcomes:
        cells = ["–"] * (len(head) - 4)
        if (figures := outcome.figures) and reference:
            difference = loss_difference(figures, reference)
            cells = [
                f"{figures.loop_s:.2f}",
                f"{figures.speed:,.0f}",
                f"{figures.peak_memory_gib:.2f}",
                "reference" if figures is reference else f"{difference:.1e}" if difference else "equal",
                number(figures.save_waits_s, 3),
                number(figures.save_stands_s, 3),
                number(figures.evaluation.get("loss"), 4),
                *(number(figures.evaluation.get(name)) for name in metrics),
            ]
        failure = [f"failed: {outcome.failure}"] if outcome.failure else []
        remarks = "; ".join([*failure, *(change for change in outcome.changes if change not in common)])
        rows.append([outcome.preset, str(outcome.num_processes), outcome.precision, *cells, remarks.replace("|", "\\|")])
    lines = align([row[:-1] for row in rows], gap=" | ")
    return "\n".join(f"| {line} | {row[-1]} |" for line, row in zip(lines, rows, strict=True))


def draw_comparison(ran: Mapping[str, Figures], title: str, picture_path: Path) -> None:
    """Draw the presets that ran as a PNG, each in one colour in all panels. If none ran, or matplotlib is not
    installed, write no picture."""
    if not ran or not can_draw(picture_path):
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


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes as plain values, with the loss difference beside each one's figures."""
    plain = [dataclasses.asdict(outcome) for outcome in outcomes]
    for values, outcome in zip(plain, outcomes, strict=True):
        if outcome.figures:
            difference = loss_difference(outcome.figures, next(iter(presets_that_ran(outcomes).values())))
            values["loss_difference"] = difference if math.isfinite(difference) else None
    return plain
