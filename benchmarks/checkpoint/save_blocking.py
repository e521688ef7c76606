"""What a checkpoint costs: seconds that training waits, what saving adds to a run, bytes, memory, and the way back.

Our asynchronous and synchronous saves beside `Accelerator.save_state` (sharded), in the same two processes under FSDP2, in turn,
a llama of about 110 M parameters and AdamW's moments in fp32; then 20 steps after an asynchronous save beside 20 steps after a
synchronous one and after none. Writes `save_blocking_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.checkpoint.save_blocking

Nothing else may run on the machine. `--small` tries the script on a tiny model.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    RESULTS,
    build_parser,
    format_spread,
    format_table,
    run_worker,
    write_report,
)

PACKAGES = ["torch", "transformers", "accelerate"]
PRESET, NUM_PROCESSES = "fsdp2_cpu", 2
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 16_000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # save_state writes a tied weight twice
}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 1000}
NAMES = {"async": "ours, asynchronous", "sync": "ours, synchronous", "save_state": "Accelerator.save_state"}


def main() -> None:
    options = parse_options()
    sections = [{"blocking": describe_blocking, "overhead": describe_overhead}[part](options) for part in options.parts]
    about = f""".

{NUM_PROCESSES} processes over gloo, FSDP2; weights and moments in fp32, forward and backward in bf16. Times are those of the rank
that takes longer."""
    write_report(
        "save_blocking",
        "What a checkpoint costs",
        about,
        sections,
        packages=PACKAGES,
        folder=Path(tempfile.gettempdir()) if options.small else RESULTS,
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser("Blocking time and overhead of checkpoints.", parts=["blocking", "overhead"])
    parser.add_argument("--saves", type=int, default=6, help="of each side; the first is reported apart")
    parser.add_argument("--rounds", type=int, default=2, help="of the overhead's three sides")
    parser.add_argument("--steps", type=int, default=20, help="between two saves")
    parser.add_argument("--step_s", type=float, default=2.7, help="seconds of a step, about, by its number of micro-batches")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and short steps; the result goes to the temporary folder"
    )
    return parser.parse_args(arguments)


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One launch of `save_sides.py`; its figures."""
    with tempfile.TemporaryDirectory(prefix="save-blocking-") as name:
        config = {
            "part": part,
            "shape": SHAPE | (SMALL if options.small else {}),
            "work_folder": name,
            "rounds": options.saves if part == "blocking" else options.rounds,
            "steps": options.steps,
            "step_s": 0.2 if options.small else options.step_s,
            "num_row_tokens": 64 if options.small else 256,
        }
        script, file = "benchmarks/checkpoint/save_sides.py", Path(name) / "config.json"
        figures = run_worker(script, config, file, preset=PRESET, num_processes=NUM_PROCESSES)
    print(json.dumps(figures), flush=True)
    return figures


def describe_blocking(options: argparse.Namespace) -> str:
    """A section of the report."""
    return describe_figures(measure("blocking", options), options)


def describe_figures(figures: dict[str, Any], options: argparse.Namespace) -> str:
    """A section of the report, of what `measure("blocking")` returned."""
    later = {side: values[1:] for side, values in figures["blocking_s"].items()}
    whose = {"async": "toolkit", "sync": "toolkit", "save_state": "save_state"}
    rows = [
        [
            NAMES[side],
            f"{figures['blocking_s'][side][0]:.2f}",
            format_spread(values, 2),
            format_spread([mine / theirs for mine, theirs in zip(values, later["save_state"], strict=True)], 2),
            f"{figures['num_bytes'][whose[side]] / 1e6:,.1f}",
        ]
        for side, values in later.items()
    ]
    copies = figures["copy_s"][1:]
    ratios = [copy / theirs for copy, theirs in zip(copies, later["save_state"], strict=True)]
    bound = [f"{figures['copy_s'][0]:.2f}", format_spread(copies, 2), format_spread(ratios, 2), ""]
    rows.append(["copying the same bytes in memory: the bound", *bound])
    every = "\n".join(f"- {NAMES[side]}: {', '.join(f'{value:.2f}' for value in v)}" for side, v in figures["blocking_s"].items())
    resumes = [
        ["ours, every hash compared", format_spread(figures["resume_s"]["toolkit"], 2)],
        ["Accelerator.load_state", format_spread(figures["resume_s"]["load_state"], 2)],
    ]
    return f"""## Seconds that training waits for a save

Llama of {figures["num_parameters"] / 1e6:.1f} M parameters. Sides in turn in the same two processes, each save from a moment when
nothing is left to write; minimum / median / maximum of {options.saves - 1} saves after the first, ratios within a round.
The first asynchronous save takes the host memory that later ones use again. `save_state` returns once the system has the
bytes; ours are hashed and on the disk when they count. The asynchronous ones are that, behind a training that stood still
here, after {format_spread(figures["write_s"], 2)} s.

{format_table(["", "first save, s", "later saves, s", "times save_state", "MB"], rows)}

All saves, in seconds:

{every}

## Seconds to load a checkpoint

From choosing it to the last tensor in place, files in the page cache; minimum / median / maximum of {options.saves}.

{format_table(["", "s"], resumes)}"""


def describe_overhead(options: argparse.Namespace) -> str:
    """A section of the report."""
    figures = measure("overhead", options)
    without = figures["seconds"]["no saves"]
    rows = [
        [
            side,
            format_spread(values, 1),
            format_spread([100 * (value / other - 1) for value, other in zip(values, without, strict=True)], 1),
            format_spread([value - other for value, other in zip(values, without, strict=True)], 2),
            f"{figures['peak_gib'][side][0]:.2f}",
        ]
        for side, values in figures["seconds"].items()
    ]
    step_s = statistics.median(without) / options.steps
    return f"""## What a save every {options.steps} steps adds to a run

A block is a save and {options.steps} steps, of {figures["num_step_tokens"]:,} tokens and {step_s:.2f} s each, to the end of the
save; blocks of the three sides in turn, {options.rounds} rounds; minimum / median / maximum, differences within a round.
An asynchronous save was written behind the training in {format_spread(figures["write_s"], 1)} s, by a thread on the cores
that train. Peak memory: resident, of the larger rank, in the first round, where no side has yet what another took.

{format_table(["", "block, s", "more than no saves, %", "more, s", "peak GiB"], rows)}"""


if __name__ == "__main__":
    main()
