"""Host memory, seconds and checkpoints of a base in codes beside one in bf16, loaded and trained with LoRA under FSDP2.

Runs `load_sides.py` as `load_memory` does. Writes `quantized_base_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.quantized_base
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    build_parser,
    format_ratios,
    format_runs,
    format_spread,
    format_table,
    interleave,
    median,
    write_report,
)
from benchmarks.memory.load_memory import NUM_PROCESSES, PACKAGES, TRAINED_TOO, load, write_model
from benchmarks.memory.load_sides import NUM_ROW_TOKENS

LORA: dict[str, Any] = {"adapter.method": "lora", "adapter.rank": 16, "model.frozen_dtype": "bfloat16"}
BASES: dict[str, dict[str, Any]] = {"bf16": {}, "nf4": {"adapter.base_dtype": "nf4"}, "int8": {"adapter.base_dtype": "int8"}}


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="quantized-base-") as name:
        folder = Path(name) / "model"
        num_bytes = write_model(folder, options, options.num_layers)
        runs = interleave(lambda base, _: load(folder, TRAINED_TOO, LORA | BASES[base]), [*BASES], options.repetitions, "bases")
    loaded, trained = [], []
    for base, figures in runs.items():
        mib = {name: [run[name] / 2**20 for run in figures] for name in ("shard_bytes", "anonymous_peak", "trained_peak")}
        beside = [peak - shards for peak, shards in zip(mib["anonymous_peak"], mib["shard_bytes"], strict=True)]
        shards = f"{mib['shard_bytes'][0]:,.0f}"
        loaded.append([base, shards, format_spread(beside, 0), format_runs(figures, "seconds")])
        checkpoint = f"{median(figures, 'checkpoint_bytes') / 2**20:,.1f}"
        slower = format_ratios(figures, runs["bf16"], "step_s")
        trained.append([base, format_spread(mib["trained_peak"], 0), format_runs(figures, "step_s"), slower, checkpoint])
    about = f"""; FSDP2, {NUM_PROCESSES} processes over gloo, which hold the shards in host memory. Weights of
{num_bytes / 2**30:.2f} GiB in bf16, in the page cache, under LoRA of rank 16 on all linear layers. Minimum / median / maximum of
{options.repetitions} repetitions, sides interleaved; anonymous memory of the rank that has most. Load average
{os.getloadavg()[0]:.1f} at the end: what is above {NUM_PROCESSES} is other work. Not measured on a GPU."""
    tables = [
        "## Loading\n\nSeconds count reading, quantizing and hashing.\n\n"
        + format_table(["base", "one rank's shards, MiB", "peak beside them, MiB", "seconds"], loaded),
        f"## Training\n\nA step is a row of {NUM_ROW_TOKENS} tokens on each rank; the peak counts the shards.\n\n"
        + format_table(["base", "peak in steps, MiB", "step, s", "times bf16", "checkpoint, MiB"], trained),
    ]
    write_report("quantized_base", "QLoRA beside LoRA on a bf16 base", about, tables, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Host memory and time of loading a base in codes.", repetitions=2)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--num_layers", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
