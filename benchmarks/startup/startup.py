"""Seconds from the command to the first step by phase, beside a plain script, with files and tokens in their caches.

A frozen Llama of 3 GB in bf16 under LoRA on a CPU: of few, wide layers and short rows, so that the step itself is cheap. The
plain script is `from_pretrained`, peft, and one step (`plain.py`); its FSDP2 is torch's `fully_shard` after each rank has loaded
the model. Both sides are started by the launcher that a user types. Writes `startup_<hardware>_<date>.md` into
`benchmarks/results/`.

    python -m benchmarks.startup.startup
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import LORA, TINY, UNPACKED, Case, list_flags, random_weights, write_inputs
from benchmarks.measuring import as_arguments, build_parser, format_table, num_cores, run_side, write_report
from benchmarks.plan.plan_error import llama

PACKAGES = ["torch", "transformers", "accelerate", "peft", "datasets"]
PRESETS = {"single": ("single_cpu", 1), "FSDP2 x 2": ("fsdp2_cpu", 2)}
"""By name, the preset of ours and its processes; with a GPU, one process is on it."""
PARTS = {
    "launcher, Python, imports": ("before the run",),
    "config, checks, run folder": ("comparing", "building the accelerator", "connecting", "opening the run", "choosing"),
    "the model's structure": ("building the model",),
    "tokens and batch plan": ("tokenizing", "opening the tokenized", "planning"),
    "opening the weights, adapter": ("loading the model",),
    "hash of the frozen base, where it is not read whole": ("hashing",),
    "weights with their hash, wrapping, optimizer": ("sharding",),
    "checks of the model": ("checking the model",),
    "what the run records": ("loading the checkpoint", "recording"),
    "sums of the parameters, garbage": ("starting the training",),
    "first step": ("loading rows", "forward", "update"),
}
"""Rows of the table, and the beginnings of the phases that are in them."""
Phases = dict[str, list[float]]
"""Of each, the seconds, and those of processor time."""


def main() -> None:
    options = parse_options()
    sections = []
    with tempfile.TemporaryDirectory(prefix="startup-", dir=options.folder) as name:
        folder = Path(name)
        model, flags = llama(*options.model, is_tied=True), LORA | UNPACKED
        case = Case(title="", model=TINY["llm"] if options.small else model, tokens=(32,), rows=2, shares=None, flags=flags)
        write_inputs(case, 4, folder)
        weights = random_weights(case, folder, folder, "bfloat16")
        num_bytes = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
        for preset in options.presets:
            sides: dict[str, list[Phases]] = {"ours": [], "plain": []}
            for repetition in range(options.repetitions + (not options.small)):
                for side, runs in sides.items():
                    runs.append(start(side, preset, case, folder, weights, repetition))
                    print(f"{preset}, {side}: {runs[-1]}", flush=True)
            fastest = [min(runs[not options.small :], key=lambda run: sum_of(run)[0]) for runs in sides.values()]
            sections.append(describe(preset, *fastest))
    if options.line:
        print("; ".join(f"{side} {sum_of(run)[0]:.1f} s: {shown(run)}" for side, run in zip(sides, fastest, strict=True)))
        return
    about = f""". {options.note}

{num_bytes / 1e9:.2f} GB of files in bf16, LoRA on all linear layers, rows of 32 tokens, computed in bf16. Seconds of rank 0 from
the command to the end of the first step, and behind the semicolon those of processor time, the launcher's included. Of
{options.repetitions} starts of each side in turns, the fastest, after one that filled the caches; the cores shared out as
threads, which do not spin while they wait for others. Goal: 1.2 times the plain script."""
    write_report("startup", "From the command to the first step", about, sections, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Seconds to the first step, by phase.", repetitions=2)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument(
        "--model", nargs=6, type=int, default=[4096, 12288, 7, 32, 8, 32000],
        metavar=("HIDDEN", "INNER", "LAYERS", "HEADS", "KV_HEADS", "VOCABULARY"),
    )  # fmt: skip
    parser.add_argument("--folder", help="for weights and runs, 4 GiB (TMPDIR)")
    parser.add_argument("--small", action="store_true", help="a tiny model and no start that only fills the caches, to try it")
    parser.add_argument("--line", action="store_true", help="print a line, as a part of `make gpu`, and write no report")
    parser.add_argument("--note", default="", help="a sentence for the report")
    return parser.parse_args()


def start(side: str, preset: str, case: Case, folder: Path, weights: Path, repetition: int) -> Phases:
    """Start a side; its phases."""
    import torch

    name, number = PRESETS[preset]
    if number == 1 and torch.cuda.is_available():
        name = "single"
    if side == "ours":
        launch = ["-m", "accelerate.commands.launch", "--mixed_precision", "bf16"]
        launch += ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", str(number)]
        flags = list_flags(case, folder, weights, number) | {"train.max_steps": 2, "run.name": f"{name}-{repetition}"}
        arguments: list[Any] = ["benchmarks/startup/ours.py", *as_arguments(flags)]
    else:
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(number)] if number > 1 else []
        arguments = ["benchmarks/startup/plain.py", weights, folder]
    os.environ["STARTED_AT_S"] = str(time.time())
    phases = run_side([sys.executable, *launch, *arguments], num_threads=max(1, num_cores() // number)).figures
    del phases["peak_memory_gib"]
    return phases


def describe(preset: str, ours: Phases, plain: Phases) -> str:
    """A section of the report."""
    parts = {part: sum_of({name: ours[name] for name in ours if name.startswith(begins)}) for part, begins in PARTS.items()}
    (seconds, of_processor), (plain_seconds, of_plain_processor) = sum_of(ours), sum_of(plain)
    assert abs(sum_of(parts)[0] - seconds) < 1e-6, f"a phase is in no part: {list(ours)}"
    ratio = f"{seconds / plain_seconds:.2f}; {of_processor / of_plain_processor:.2f}"
    tables = [
        format_table([side, "seconds; of processor time"], [[name, f"{all_s:.2f}; {own_s:.2f}"] for name, (all_s, own_s) in rows])
        for side, rows in (("ours", [*parts.items(), ("all", sum_of(ours))]), ("plain", [*plain.items(), ("all", sum_of(plain))]))
    ]
    return "\n\n".join([f"## {preset}: {ratio} times the plain script", *tables])


def shown(phases: Phases) -> str:
    """The seconds of the phases that take a tenth of one or more."""
    return ", ".join(f"{phase} {seconds:.1f}" for phase, (seconds, _) in phases.items() if seconds >= 0.1)


def sum_of(phases: Phases) -> list[float]:
    """The seconds of all phases, and those of processor time."""
    return [sum(both[place] for both in phases.values()) for place in (0, 1)]


if __name__ == "__main__":
    main()
