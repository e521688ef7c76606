"""Whether a run that was interrupted is the run that nobody has touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.recipes.test_resume import compare_checkpoints, curves, on_one_process
from tests.support.workbench import Workbench
from toolkit.files.json_lines import load_json_lines


def rows_of(run_folder: Path) -> list[tuple[str, int, int, int]]:
    """`(rank, step, micro-batch, row)` of every row that was trained on, as often as the run has logged it."""
    return [
        (path.stem, line["step"], line["micro_batch"], row_id)
        for path in sorted(run_folder.glob("rows-*.jsonl"))
        for line in load_json_lines(path)
        for row_id in line["row_ids"]
    ]


def find_differences(bench: Workbench, whole: str, other: str, num_steps: int) -> list[str]:
    """Names of what two finished runs do not have in common, bit for bit: figures, tensors, exports, checkpoints kept."""
    compared = on_one_process(compare_checkpoints, bench.runs / whole, bench.runs / other, num_steps)
    assert compared["num_weights"] > 0 and compared["num_moments"] >= 2 * compared["num_weights"], "nothing was compared"
    left, right = (what_is_left(bench, name, num_steps) for name in (whole, other))
    assert [line["step"] for line in left["train lines"]] == list(range(1, num_steps + 1)), "the whole run lacks steps"
    differences = [what for what in left if left[what] != right[what]] + compared["unequal"]
    return differences + ["random states"] * (not compared["same_random_state"])


def what_is_left(bench: Workbench, name: str, num_steps: int) -> dict[str, Any]:
    """Of a finished run: all that does not depend on the clock, except for the tensors of its checkpoint."""
    folder = bench.runs / name
    manifest = json.loads((folder / "checkpoints" / f"step-{num_steps:08d}" / "manifest.json").read_text())
    return {
        "train lines": [curves(line) for line in bench.lines(name, "train")],
        "eval lines": [without_clock(line) for line in bench.lines(name, "eval")],
        "state in the manifest": manifest["state"],
        "metrics in the manifest": without_clock(manifest["metrics"]),
        "export": (folder / "export" / "model.safetensors").read_bytes(),
        "names of checkpoints": bench.checkpoints(name),
    }


def without_clock(figures: dict[str, Any]) -> dict[str, Any]:
    """Without times and memory."""
    return {name: value for name, value in figures.items() if not name.endswith(("_s", "_gib"))}
