"""`make bench-growth`: what grows with rows, row length, processes, vocabulary and model, one at a time.

Rows: seconds and memory to plan the batches. The rest: short runs of `recipes/llm.py`'s `finetune` under FSDP2, with the
seconds of a step, the peak memory of a rank, and the bytes and collectives of a step beside FSDP's minimum. Writes
`growth_<hardware>_<date>.md` into `benchmarks/results/`. It takes as long as it takes.

    python -m benchmarks.growth
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import Case, write_inputs
from benchmarks.measuring import build_parser, format_table, memory_gib, num_cores, run_worker, write_report
from benchmarks.plan.plan_error import llama

PACKAGES = ["torch", "transformers", "accelerate"]
NUM_STEPS = 5
NUM_ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
WIDTHS = {
    "8 M": (256, 640, 8, 4, 4),
    "25 M": (512, 1408, 8, 8, 8),
    "85 M": (768, 2048, 12, 12, 12),
    "200 M": (1024, 2816, 15, 16, 16),
}
"""Arguments of `llama`, except for the vocabulary."""
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "length": {f"{length:,} tokens": {"length": length} for length in (256, 512, 1024, 2048, 4096, 8192)},
    "ranks": {f"{ranks} processes": {"ranks": ranks} for ranks in (1, 2, 4)},
    "vocabulary": {f"{size:,} tokens": {"vocab_size": size} for size in (4_096, 32_000, 128_256, 250_112)},
    "model": {name: {"width": name} for name in WIDTHS},
}
SMALLEST: dict[str, Any] = {"length": 256, "ranks": 2, "vocab_size": 4_096, "width": "8 M"}


def main() -> None:
    parser = build_parser("What grows with rows, length, processes, vocabulary and model.", parts=["rows", *AXES])
    parser.add_argument("--most", type=int, default=None, help="values of each axis, from the smallest; unset: all")
    options = parser.parse_args()
    sections = [plan_rows(options.most) if part == "rows" else grow(part, options.most) for part in options.parts]
    about = f""".

Each axis from the same smallest run: {SMALLEST["width"]} parameters, one row of {SMALLEST["length"]} tokens on each of
{SMALLEST["ranks"]} processes (FSDP2 over gloo, bf16), vocabulary {SMALLEST["vocab_size"]:,}. Seconds: the median of
{NUM_STEPS} steps."""
    write_report("growth", "What grows", about, sections, packages=PACKAGES)


def plan_rows(most: int | None) -> str:
    """Seconds and memory of the batch plan; a section of the report."""
    from toolkit.config.schema import TrainConfig
    from toolkit.data.batch_plan import BatchPlan

    rows = []
    for num_rows in NUM_ROWS[:most]:
        lengths = np.random.default_rng(0).integers(8, 513, num_rows)
        for packing in (False, True):
            before_gib, start_s = memory_gib("RssAnon"), time.perf_counter()
            train = TrainConfig(global_batch_size_rows=256, micro_batch_size_rows=32, num_epochs=1)
            plan = BatchPlan(lengths, lengths // 2, train, 8, pack_length_tokens=512 if packing else None)
            plan.step(1)
            built_s, start_s = time.perf_counter() - start_s, time.perf_counter()
            for number in range(1, 101):
                plan.micro_batches(plan.step(1 + number % plan.steps_per_epoch), 0)
            step_s = (time.perf_counter() - start_s) / 100
            grown = memory_gib("RssAnon") - before_gib
            rows.append(
                [f"{num_rows:,}, {'packed' if packing else 'bucketed'}", f"{built_s:.2f}", f"{step_s * 1e3:.2f}", f"{grown:.2f}"]
            )
            print(" | ".join(rows[-1]), flush=True)
            del plan  # or the next one's memory would be counted above this one's
    return f"""## Rows

The batch plan of an epoch on 8 ranks, rows of 8 to 512 tokens; then a rank's micro-batches of a step.

{format_table(["rows", "plan, s", "a step's micro-batches, ms", "memory, GiB"], rows)}"""


def grow(axis: str, most: int | None) -> str:
    """Short runs along an axis; a section of the report."""
    rows = []
    for name, change in list(AXES[axis].items())[:most]:
        figures = measure(SMALLEST | change)
        ratio = f"{figures['num_bytes'] / figures['minimum_bytes']:.4f}" if figures["minimum_bytes"] else ""
        megabytes = f"{figures['num_bytes'] / 1e6:,.1f}"
        cells = [f"{figures['num_parameters'] / 1e6:,.1f}", f"{figures['step_s']:.2f}", f"{figures['peak_gib']:.2f}"]
        rows.append([name, *cells, str(figures["calls"]), megabytes, ratio])
        print(json.dumps({"axis": axis, "value": name, **figures}), flush=True)
    columns = ["", "M parameters", "s a step", "peak GiB of a rank", "collectives a step", "MB a step", "times FSDP's minimum"]
    return f"## {axis.capitalize()}\n\n{format_table(columns, rows)}"


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    """One run; the figures of `growth_side.py`."""
    model = llama(*WIDTHS[setting["width"]], setting["vocab_size"]) | {"max_position_embeddings": 8192}
    case = Case(title="", model=model, tokens=(setting["length"],), rows=max(1, setting["ranks"]), shares=None)
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        write_inputs(case, 2 * NUM_STEPS, folder)
        flags = {
            "model.name_or_path": str(folder / "model"),
            "model.from_scratch": True,
            "data.source": "jsonl",
            "data.files": [str(folder / "rows.jsonl")],
            "data.eval_fraction": 0,
            "data.cache_dir": str(folder / "cache"),
            "data.max_length_tokens": setting["length"],
            "data.packing": True,
            "train.global_batch_size_rows": setting["ranks"],
            "train.micro_batch_size_rows": 1,
            "train.max_steps": 3 + NUM_STEPS,
            "eval.at_start": False,
            "run.output_dir": str(folder),
            "run.name": "run",
        }
        preset, ranks = ("fsdp2_cpu", setting["ranks"]) if setting["ranks"] > 1 else ("single", 1)
        script = "benchmarks/throughput/growth_side.py"
        figures = run_worker(script, {"flags": flags}, folder / "side.json", preset=preset, num_processes=ranks)
    return figures | {"threads": max(1, num_cores() // ranks)}


if __name__ == "__main__":
    main()
