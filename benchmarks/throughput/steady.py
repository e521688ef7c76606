"""Do steps creep? Processor time, memory and objects of 300 steps of one run, the first 50 beside the last 50.

One process on one thread of a CPU trains a T5 of 4 + 4 blocks on rows of changing lengths, with dropout, evaluating and saving
nothing. The time is the main thread's, by tokens, as no two steps have the same.

    python -m benchmarks.throughput.steady
"""

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.parts import finetune_here, preset_file
from benchmarks.gpu.shapes import Case, list_flags, write_inputs
from benchmarks.measuring import build_parser, format_spread, format_table, memory_gib, write_report
from benchmarks.plan.plan_error import t5

NUM_STEPS, NUM_COMPARED, NUM_WARM_UP = 300, 50, 10


def main() -> None:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--note", default="", help="a sentence for the report")
    note = parser.parse_args().note
    steps = measure()
    assert len(steps) == NUM_STEPS
    parts = {
        f"{first + 1} to {first + NUM_COMPARED}": steps[first : first + NUM_COMPARED]
        for first in (NUM_WARM_UP, 130, NUM_STEPS - NUM_COMPARED)
    }
    rows = [
        [
            name,
            format_spread([step["ms"] / step["tokens"] * 1e3 for step in part]),
            f"{part[-1]['gib']:.2f}",
            str(part[-1]["objects"]),
        ]
        for name, part in parts.items()
    ]
    first, last = (
        statistics.median(step["ms"] / step["tokens"] for step in part) for part in (list(parts.values())[i] for i in (0, -1))
    )
    table = format_table(["steps", "ms by 1,000 tokens, minimum / median / maximum", "resident GiB", "objects"], rows)
    about = (
        f". {note}\n\nSee the script. Resident memory, and objects that Python's collector watches, after the last of the steps."
    )
    verdict = f"The last {NUM_COMPARED} take {last / first:.3f} times the first. Goal: no more than 1, beside the spread."
    write_report("steady", "Do steps creep?", about, [verdict, table], packages=["torch", "transformers", "accelerate"])


def measure() -> list[dict[str, float]]:
    """Of each step."""
    import torch

    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.files.json_lines import load_json_lines
    from toolkit.training import finetune
    from toolkit.training.run import leave

    torch.set_num_threads(1)
    model = t5(64, 128, 4, 4) | {"d_kv": 16, "vocab_size": 1024}
    case = Case(title="T5", model=model, tokens=(64, 16), rows=4, shares=(0.3, 1.0))
    steps: list[dict[str, float]] = []
    since_s = time.thread_time()

    def after_step(_: Any) -> None:
        nonlocal since_s
        steps.append({"ms": (time.thread_time() - since_s) * 1e3, "gib": memory_gib("VmRSS"), "objects": len(gc.get_objects())})
        since_s = time.thread_time()

    with (
        tempfile.TemporaryDirectory(prefix="steady-") as name,
        mock.patch.object(CheckpointWriter, "save", lambda *_, **__: None),
        mock.patch.object(finetune, "finish", lambda run: leave(run.trackers)),
    ):
        folder = Path(name)
        write_inputs(case, NUM_STEPS, folder)
        flags = list_flags(case, folder, None) | {"train.max_steps": NUM_STEPS, "run.num_threads": 1, "run.name": "run"}
        finetune_here(preset_file("single_cpu", folder), case.recipe, flags, after_step)
        lines = [line for line in load_json_lines(folder / "runs" / "run" / "metrics.jsonl") if line["kind"] == "train"]
    every = NUM_STEPS // len(lines)  # of a line, by the mean of its steps
    return [step | {"tokens": lines[place // every]["num_tokens"] / every} for place, step in enumerate(steps)]


if __name__ == "__main__":
    main()
