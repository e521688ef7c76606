"""`make bench`: ours beside the peers, with their defaults and matched, and beside a bare loop on our batches, in one table.

Each side is a process that is started once; sides take turns, in another order each time, and ratios are taken within a turn. So
a machine that is busy for a while slows all alike. The first turn of each side warms up and is not counted. Writes
`bench_<hardware>_<date>.md` and `.json` into `benchmarks/results/`.

    python -m benchmarks.bench

On a GPU, `make gpu` has these sides on models of the real shapes.

Nothing else may run on the machine. A goal is met when the median passes it by the interquartile range.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint import save_blocking
from benchmarks.measuring import (
    RESULTS,
    Figures,
    build_parser,
    describe_versions,
    format_table,
    num_cores,
    report_path,
    write_report,
)
from benchmarks.throughput.comparisons import Comparison, dpo_training, llm_training, t5_evaluation, t5_training

PACKAGES = ["torch", "transformers", "accelerate", "trl", "datasets", "tokenizers"]
SMALL = {
    "t5-training": {"num_rows": 32, "default_steps": 1},
    "t5-evaluation": {"num_rows": 8, "weights_steps": 2},
    "llm-training": {"num_rows": 32, "default_steps": 1},
    "dpo-training": {"num_rows": 32, "default_steps": 1},
}
FULL = {
    "t5-training": {"num_rows": 240, "default_steps": 6},
    "t5-evaluation": {"num_rows": 96, "weights_steps": 60},
    "llm-training": {"num_rows": 128, "default_steps": 4},
    "dpo-training": {"num_rows": 96, "default_steps": 3},
}
PARTS = [*FULL, "saves"]
COMPARISONS: dict[str, Callable[..., Comparison]] = {
    "t5-training": t5_training,
    "t5-evaluation": t5_evaluation,
    "llm-training": llm_training,
    "dpo-training": dpo_training,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a ratio with its spread over the turns, beside its goal."""

    what: str
    ours: str
    beside: str
    ratios: list[float]
    goal: str = ""
    is_met: bool | None = None


def main() -> None:
    options = parse_options()
    folder = Path(tempfile.gettempdir()) if options.small else RESULTS
    about = f"""; {"bf16" if torch.cuda.is_available() else "fp32"} on both sides.

Median [quartiles] of {options.repetitions} turns after a first one that warms up; ratios are taken within a turn.
Times are of training steps and evaluations, not of starts."""
    rows: list[Row] = []
    sections: list[str] = []
    raw: dict[str, Any] = {}
    for part in options.parts:
        found, section, raw[part] = measure_saves(options) if part == "saves" else compare(part, options)
        rows += found
        sections.append(section)
        print(format_rows(found), flush=True)
        # After each part, because a later one may fail.
        result = {"versions": describe_versions(PACKAGES), "rows": [asdict(row) for row in rows], "turns": raw}
        report_path("bench", folder, "json").write_text(json.dumps(result, indent=1) + "\n")
        table = f"## The table\n\nHow many times as fast as the other side, unless it says otherwise.\n\n{format_rows(rows)}"
        write_report("bench", "Ours beside the peers", about, [table, *sections], packages=PACKAGES, folder=folder)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Ours beside the peers, in one table.", parts=PARTS, repetitions=5)
    parser.add_argument(
        "--small", action="store_true", help="few rows, to try the script; the result goes to the temporary folder"
    )
    return parser.parse_args()


def compare(part: str, options: argparse.Namespace) -> tuple[list[Row], str, dict[str, list[Figures]]]:
    """Measure the sides of a comparison: rows of the table, a section of the report, and the figures of every turn."""
    with tempfile.TemporaryDirectory(prefix=f"{part}-") as folder:
        comparison = COMPARISONS[part](Path(folder), num_cores(), **(SMALL if options.small else FULL)[part])
        turns, peaks_gib = take_turns(comparison, options.repetitions)
    speeds = {side: [turn[comparison.unit] / turn["seconds"] for turn in each[1:]] for side, each in turns.items()}
    rows = []
    for pair in comparison.against:
        ratios = [ours / other for ours, other in zip(speeds[pair.ours], speeds[pair.beside], strict=True)]
        what = f"{comparison.title}, {comparison.unit}/s"
        if pair.max_overhead is not None:
            overheads = [1 / ratio - 1 for ratio in ratios]
            row = Row(what=f"{comparison.title}, overhead", ours=pair.ours, beside=pair.beside, ratios=overheads)
            rows.append(judge_most(row, pair.max_overhead, f"≤ {pair.max_overhead:.0%}"))
        else:
            rows.append(judge_least(Row(what=what, ours=pair.ours, beside=pair.beside, ratios=ratios), pair.goal))
    losses = losses_at_same_tokens(turns) if comparison.is_training else {side: each[-1]["loss"] for side, each in turns.items()}
    header = [f"{comparison.unit}/s", *(name.replace("_", " ") for name in comparison.figures), "loss", "peak GiB"]
    table = [
        [
            side,
            format_quartiles(speeds[side], 0 if comparison.unit == "tokens" else 1),
            *(f"{each[-1][name]:.2f}" if name in each[-1] else "" for name in comparison.figures),
            f"{losses[side]:.3f}",
            f"{peaks_gib[side]:.2f}",
        ]
        for side, each in turns.items()
    ]
    same = "Loss: of the same number of tokens from the start, interpolated. " if comparison.is_training else ""
    note = f"{comparison.about}\n{same}Memory: resident, of one process."
    return rows, f"## {comparison.title}\n\n{note}\n\n{format_table(['', *header], table)}", turns


def take_turns(comparison: Comparison, repetitions: int) -> tuple[dict[str, list[Figures]], dict[str, float]]:
    """The figures of every turn by side, the first, which warms up, included; and each side's peak memory in GiB."""
    names = list(comparison.sides)
    turns: dict[str, list[Figures]] = {name: [] for name in names}
    running = {}
    for repetition in range(repetitions + 1):
        for place in range(len(names)):
            name = names[(place + repetition) % len(names)]
            if name not in running:
                running[name] = comparison.sides[name]()
            turns[name].append(running[name].take_turn())
            print(f"{comparison.title} {repetition}/{repetitions}, {name}: {json.dumps(turns[name][-1])}", flush=True)
    return turns, {name: side.close() for name, side in running.items()}


def losses_at_same_tokens(turns: dict[str, list[Figures]]) -> dict[str, float]:
    """Each side's loss at as many tokens as the slowest side saw; the mean loss of a turn stands at its middle."""
    curves = {}
    for side, each in turns.items():
        seen = np.cumsum([turn["tokens"] for turn in each])
        curves[side] = (seen - np.array([turn["tokens"] for turn in each]) / 2, [turn["loss"] for turn in each])
    fewest = min(middles[-1] for middles, _ in curves.values())
    return {side: float(np.interp(fewest, *curve)) for side, curve in curves.items()}


def measure_saves(options: argparse.Namespace) -> tuple[list[Row], str, dict[str, Any]]:
    """How long a save keeps training waiting, beside `Accelerator.save_state` and a plain copy of the same bytes in memory."""
    arguments = ["--parts", "blocking", "--saves", str(options.repetitions + 1), *(["--small"] if options.small else [])]
    saves = save_blocking.parse_options(arguments)
    figures = save_blocking.measure("blocking", saves)
    seconds, copies = figures["blocking_s"], figures["copy_s"]
    ours, theirs = "asynchronous save, waiting", save_blocking.NAMES["save_state"]
    of_save_state = [mine / other for mine, other in list(zip(seconds["async"], seconds["save_state"], strict=True))[1:]]
    of_bound = [mine / copy for mine, copy in list(zip(seconds["async"], copies, strict=True))[1:]]
    rows = [
        judge_most(Row(what="checkpoint, seconds", ours=ours, beside=theirs, ratios=of_save_state), 0.1, "≤ 1/10, or the bound"),
        Row(what="checkpoint, seconds", ours=ours, beside="copying its bytes in memory: the bound", ratios=of_bound),
    ]
    return rows, save_blocking.describe_figures(figures, saves), figures


def judge_least(row: Row, goal: float | None) -> Row:
    """The row with its goal, which its median must pass by the interquartile range."""
    if goal is None:
        return row
    low, median, high = np.percentile(row.ratios, [25, 50, 75])
    return Row(**asdict(row) | {"goal": f"≥ {goal}", "is_met": bool(median - (high - low) >= goal)})


def judge_most(row: Row, goal: float, wording: str) -> Row:
    """As `judge_least`, of a ratio that should be small."""
    low, median, high = np.percentile(row.ratios, [25, 50, 75])
    return Row(**asdict(row) | {"goal": wording, "is_met": bool(median + (high - low) <= goal)})


def format_rows(rows: list[Row]) -> str:
    """The table."""
    verdicts = {None: "", True: "yes", False: "missed"}
    header = ["", "ours", "beside", "ratio", "goal", "met"]
    return format_table(
        header,
        [[row.what, row.ours, row.beside, format_quartiles(row.ratios, 2), row.goal, verdicts[row.is_met]] for row in rows],
    )


def format_quartiles(values: list[float], digits: int) -> str:
    """`median [lower quartile, upper quartile]`."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


if __name__ == "__main__":
    main()
