"""The report of `make gpu`, and the tables that README and `benchmarks/README.md` have of it.

    python -m benchmarks.gpu.report benchmarks/results/gpu_nvidia-h200_2026-11.json

writes the Markdown file beside a JSON file, and prints both tables; a test compares them with the pages.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import format_table
from toolkit.files.durable import written_beside

Figures = dict[str, Any]
SPEED = {
    "rows/s": ("rows_per_s", ",.0f"), "tokens/s": ("tokens_per_s", ",.0f"), "step, s": ("step_s", ".3f"),
    "MFU, %": ("mfu_percent", ".1f"), "GPU idle, %": ("idle_percent", ".0f"), "peak GiB": ("peak_gib", ".2f"),
    "planned": ("planned_gib", ".2f"), "to step 1, s": ("to_first_step_s", ".1f"), "first turn, s": ("first_turn_s", ".1f"),
}  # fmt: skip
STEP = {name.replace("_", " "): (name, form) for name, form in (
    ("kernels", ",d"), ("busy_ms", ".1f"), ("host_operations", ",d"), ("casts", ",d"), ("waits", ",d"), ("waits_ms", ".1f"),
)}  # fmt: skip
NOTE = """Weights are random, tokens those of the rows without padding. GPU idle: the share of a step in which no kernel runs,
by the kernels' time in one profiled step; there the host is the bound. Peak and planned: `torch.cuda.max_memory_allocated` of
training steps, and what `python -m toolkit plan` says. To step 1: from the call of `finetune` to its first update. First turn: a
whole process up to its first steps, or its first evaluation."""


def read_figures(result: Figures, *tables: str) -> list[Figures]:
    """The figures for some tables, of all parts."""
    return [figures for part in result["parts"].values() for figures in part["figures"] if figures["table"] in tables]


def lay_out(columns: dict[str, tuple[str, str]], rows: list[Figures], names: Sequence[tuple[str, ...]]) -> str:
    """A table of `names` and figures, without the columns in which no row has anything."""
    kept = {name: key for name, key in columns.items() if any(row.get(key[0]) is not None for row in rows)}
    body = [[*of, *("" if row.get(key) is None else format(row[key], form) for key, form in kept.values())]
            for of, row in zip(names, rows, strict=True)]  # fmt: skip
    return format_table(["work", *["side"] * (len(names[0]) - 2), "preset", *kept], body)


def format_speed(result: Figures) -> str:
    """Training and evaluation of every side; what stands in `benchmarks/README.md`."""
    rows = read_figures(result, "training", "evaluation")
    gpus = [f", {row['num_gpus']} GPUs" if row.get("num_gpus", 1) > 1 else "" for row in rows]
    names = [(_work(row), row["side"], row["preset"] + more) for row, more in zip(rows, gpus, strict=True)]
    return lay_out(SPEED, rows, names) if rows else ""


def _work(row: Figures) -> str:
    return row["work"] + ", evaluation" * (row["table"] == "evaluation")


def format_beside(result: Figures) -> str:
    """Ours beside the peers; what stands in README."""
    sides = {(_work(row), row["side"]): row for row in read_figures(result, "training", "evaluation") if row.get("beside")}
    body = []
    for (work, side), peer in sides.items():
        if side != "ours" and (ours := sides.get((work, "ours"))):
            unit = "tokens" if {"tokens_per_s"} <= ours.keys() & peer.keys() else "rows"
            memory = [f", {row['peak_gib']:.1f} GiB" if row.get("peak_gib") else "" for row in (ours, peer)]
            speeds = [row[f"{unit}_per_s"] for row in (ours, peer)]
            cells = [f"{speed:,.0f} {unit}/s{gib}" for speed, gib in zip(speeds, memory, strict=True)]
            body.append([work, cells[0], f"{side}: {cells[1]}", f"{speeds[0] / speeds[1]:.2f}"])
    return format_table(["", "ours", "beside", "times as fast"], body) if body else ""


def format_presets(result: Figures) -> str:
    """By preset and model, how far the losses are from the CPU's in fp32, or what became of them."""
    cells = {(row["preset"], row["model"]): row for row in read_figures(result, "presets")}
    models = list(dict.fromkeys(model for _, model in cells))

    def outcome(preset: str, model: str) -> str:
        row = cells.get((preset, model), {"verdict": ""})
        return row["verdict"] + (f", {row['difference']:.1e}" if "difference" in row else "")

    presets = dict.fromkeys(preset for preset, _ in cells)
    body = [[f"`{preset}`", *(outcome(preset, model) for model in models)] for preset in presets]
    return format_table(["", *models], body) if body else ""


def format_report(result: Figures) -> str:
    """The whole Markdown file."""
    parts = result["parts"].items()
    rows = [[name, part["verdict"], f"{part['seconds']:.0f}" if part["seconds"] else "", part["line"]] for name, part in parts]
    profiled = [row for row in read_figures(result, "training") if row.get("profiled")]
    steps = [row["profiled"] for row in profiled]
    sections = {
        "Parts": format_table(["part", "verdict", "seconds", "its last line, or why"], rows),
        "Presets: losses relative to the CPU's in fp32": format_presets(result),
        "Speed and memory": f"{NOTE}\n\n{table}" if (table := format_speed(result)) else "",
        "Beside the peers": format_beside(result),
        "One step": lay_out(STEP, steps, [(row["work"], row["preset"]) for row in profiled]) if steps else "",
        **{
            f"The end of {name}": f"`{part['command']}`\n\n```text\n{part['output']}```" for name, part in parts if part["output"]
        },
    }
    head = [f"# {result['title']}", result["about"], *result.get("notes", [])]
    return "\n\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]) + "\n"


def save_report(result: Figures, path: Path) -> None:
    """Write `path`, JSON, and the Markdown file beside it: after a kill each is complete, or the one before."""
    for file, text in (
        (path, json.dumps(result, indent=1, ensure_ascii=False) + "\n"),
        (path.with_suffix(".md"), format_report(result)),
    ):
        with written_beside(file) as beside:
            beside.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    save_report(found, Path(sys.argv[1]))
    print(format_speed(found), format_beside(found), sep="\n\n")
