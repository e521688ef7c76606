"""Host memory and time of loading a base in codes beside one in bf16, each with LoRA on all linear layers, under FSDP2.

Runs `load_sides.py` as `load_memory` does. Writes `quantized_base_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.quantized_base
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import build_parser, format_runs, format_spread, format_table, interleave, median, write_report
from benchmarks.memory.load_memory import NUM_PROCESSES, PACKAGES, SHARDED, load, write_model

LORA: dict[str, Any] = {"adapter.method": "lora", "adapter.rank": 16, "model.frozen_dtype": "bfloat16"}
BASES: dict[str, dict[str, Any]] = {"bf16": {}, "nf4": {"adapter.base_dtype": "nf4"}, "int8": {"adapter.base_dtype": "int8"}}


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="quantized-base-") as name:
        folder = Path(name) / "model"
        num_bytes = write_model(folder, options, options.num_layers)
        runs = interleave(lambda base, _: load(folder, SHARDED, LORA | BASES[base]), [*BASES], options.repetitions, "bases")
    rows = []
    for base, figures in runs.items():
        beside = [(run["anonymous_peak"] - run["shard_bytes"]) / 2**20 for run in figures]
        shards = f"{median(figures, 'shard_bytes') / 2**20:,.0f}"
        rows.append([base, shards, format_spread(beside, 0), format_runs(figures, "seconds")])
    header = ["base", "one rank's shards, MiB", "peak beside them, MiB", "seconds"]
    about = f"""; FSDP2, {NUM_PROCESSES} processes over gloo, which hold the shards in host memory. Weights of
{num_bytes / 2**30:.2f} GiB in bf16, in the page cache; seconds count reading, quantizing and hashing. Anonymous memory of the
rank that has most. Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved."""
    write_report("quantized_base", "Loading a base in codes", about, [format_table(header, rows)], packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Host memory and time of loading a base in codes.", repetitions=2)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--num_layers", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
