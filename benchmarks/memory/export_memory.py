"""Seconds and host memory of an export of a model with random weights, from a sharded model to the folder in place.

`--before` names a checkout of an older version, whose toolkit exports the same model; sides are interleaved. Each writes the
model into the temporary folder, and it is removed. Writes `export_memory_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.export_memory --before ../older-checkout
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import (
    REPOSITORY,
    Figures,
    build_parser,
    format_runs,
    format_table,
    interleave,
    median,
    run_script,
    write_report,
)

PACKAGES = ["torch", "transformers", "accelerate", "safetensors"]
PRESET, NUM_PROCESSES = "fsdp2_cpu", 2
GIB = 2**30
LARGE = 109e9
"""Parameters for which the report does the arithmetic."""


def main() -> None:
    options = parse_options()
    checkouts = {"before": options.before} if options.before else {}
    checkouts["now"] = REPOSITORY
    disk_bytes_per_s = measure_disk()
    runs = interleave(lambda side, _: export(checkouts[side], options), list(checkouts), options.repetitions, "export")
    num_parameters = median(runs["now"], "num_parameters")
    on_disk_gib, disk_mb_per_s, tokens = 4 * num_parameters / GIB, disk_bytes_per_s / 1e6, options.num_row_tokens
    about = f"""; FSDP2 in bf16 over fp32 weights, {NUM_PROCESSES} processes
over gloo, {num_parameters / 1e6:,.0f} M parameters of a Llama, {on_disk_gib:.2f} GiB on the disk in files of at most 5 GB.
Rank 0's shards are {on_disk_gib / NUM_PROCESSES:.2f} GiB. GPUs: not measured.

Of rank 0, above what it had before: *anonymous* memory is its own, *resident* has mapped pages of files too, which the kernel
can take back. *Until it stands*: seconds until the folder is renamed into place; *all*: with the logits. The rows had {tokens}
tokens, of which the older export computed all. The disk wrote {disk_mb_per_s:.0f} MB/s, fsync included, and other work shared
the machine: of the seconds, compare the order only. On CPU ranks FSDP gathers into host memory too, for the forward
and for each weight. Minimum / median / maximum of {options.repetitions} repetitions."""
    write_report("export_memory", "An export", about, [describe(runs), extrapolate(runs["now"])], packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Seconds and host memory of an export.", repetitions=1)
    parser.add_argument("--before", type=Path, help="checkout of an older version, to compare with")
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--num_layers", type=int, default=26)
    parser.add_argument("--vocab_size", type=int, default=64_000)
    parser.add_argument("--num_row_tokens", type=int, default=256)
    return parser.parse_args()


def measure_disk() -> float:
    """Bytes a second that the temporary folder's disk takes, fsync included."""
    content, num_pieces = os.urandom(2**26), 16
    with tempfile.TemporaryFile(buffering=0) as file:
        started = time.monotonic()
        for _ in range(num_pieces):
            file.write(content)
        os.fsync(file.fileno())
        return num_pieces * len(content) / (time.monotonic() - started)


def export(checkout: Path, options: argparse.Namespace) -> Figures:
    """One launch of `export_sides.py`."""
    sizes = {
        "hidden_size": options.hidden_size,
        "intermediate_size": options.hidden_size * 8 // 3 // 64 * 64,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.hidden_size // 64,
        "vocab_size": options.vocab_size,
        "num_row_tokens": options.num_row_tokens,
    }
    with tempfile.TemporaryDirectory(prefix="export-memory-") as folder:
        arguments = [str(checkout.resolve()), folder, json.dumps(sizes)]
        return run_script("benchmarks/memory/export_sides.py", arguments, preset=PRESET, num_processes=NUM_PROCESSES).figures


def describe(runs: dict[str, list[Figures]]) -> str:
    header = ["", "anonymous peak, GiB", "resident peak, GiB", "until it stands, s", "all, s", "logits"]
    columns = {"anonymous_gib": 2, "resident_gib": 2, "stands_s": 0, "seconds": 0}
    rows = []
    for side, figures in runs.items():
        logits = "compared" if all(run["compares_logits"] for run in figures) else "left out"
        rows.append([side, *(format_runs(figures, *column) for column in columns.items()), logits])
    return format_table(header, rows)


def extrapolate(now: list[Figures]) -> str:
    """Arithmetic, and named so."""
    num_parameters = median(now, "num_parameters")
    bytes_per_s = 4 * num_parameters / median(now, "stands_s")
    num_bytes = 4 * LARGE
    minutes, at_1_gb, of_logits = (num_bytes / rate / 60 for rate in (bytes_per_s, 1e9, 5e8))
    return f"""## By arithmetic: {LARGE / 1e9:.0f}B

{num_bytes / GIB:,.0f} GiB are written once and read back once, from the page cache. At the {bytes_per_s / 1e6:.0f} MB/s
that this machine reached until the folder stood, that is {minutes:.0f} minutes; at 1 GB/s it is {at_1_gb:.0f}.
Host memory is that of the largest weight, copied from the device and read back, whatever the model has; without a GPU,
also what FSDP gathers. Logits would need {num_bytes / GIB:,.0f} GiB in fp32 and, by the rule's 500 MB/s, {of_logits:.0f} minutes:
they are left out, with a line."""


if __name__ == "__main__":
    main()
