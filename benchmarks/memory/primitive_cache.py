"""Memory and speed of a CPU rank that trains in bf16, by what oneDNN's cache of primitives may hold.

Every step has another padded shape, or one of ten that come again. oneDNN keeps compiled code for each shape of each product it
has met: up to 1,024 of them, or as many as `toolkit.launch.accelerator.bound_primitive_cache` sets.
Writes `primitive_cache_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.primitive_cache
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from benchmarks.measuring import (
    Figures,
    build_parser,
    format_ratios,
    format_runs,
    format_table,
    interleave,
    memory_gib,
    run_side,
    write_report,
)

WIDTH, NUM_BLOCKS, VOCAB_SIZE = 64, 2, 500
MODELS = ("T5", "Llama")
DEFAULT, BOUNDED = "oneDNN's default", "bounded"
NUM_SHAPES = {"ever new shapes": None, "ten shapes": 10}
NUM_WARMUP_STEPS = 50


def main() -> None:
    parser = build_parser("Memory and speed of a CPU rank, by the capacity of oneDNN's primitive cache.", repetitions=2)
    parser.add_argument("--num_steps", type=int, default=500)
    parser.add_argument("--side", nargs=3, metavar=("MODEL", "SHAPES", "CACHE"), help="run this one and print its figures")
    options = parser.parse_args()
    if options.side:
        return print(json.dumps(train(*options.side, options.num_steps)))
    sections = []
    for model in MODELS:
        for shapes in NUM_SHAPES:

            def measure(side: str, _: str, of: tuple[str, str] = (model, shapes)) -> Figures:
                command = [sys.executable, __file__, "--num_steps", str(options.num_steps), "--side", *of, side]
                return run_side(command, num_threads=1).figures

            runs = interleave(measure, [DEFAULT, BOUNDED], options.repetitions, f"{model}, {shapes}")
            sections.append(f"## {model}, {shapes}\n\n{describe(runs)}")
    about = f"""; one process, one thread, bf16,
{options.num_steps:,} steps without optimizer. Models of {NUM_BLOCKS} blocks of width {WIDTH}, so that products cost little beside
what oneDNN does to prepare them: of a larger model's step the cache is a smaller part.
MiB are resident anonymous memory (`RssAnon`) after {NUM_WARMUP_STEPS} steps and at the end; steps a second of CPU time are of
the steps between. Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved.
fp32 products do not go through oneDNN here (MKL)."""
    write_report("primitive_cache", "oneDNN's cache of primitives", about, sections, packages=["torch", "transformers"])


def train(model_name: str, shapes: str, side: str, num_steps: int) -> Figures:
    """Forward and backward of so many steps in this process."""
    if side == BOUNDED:
        from toolkit.launch.accelerator import bound_primitive_cache

        bound_primitive_cache(NUM_SHAPES[shapes] or num_steps)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    model: Any
    if model_name == "T5":
        sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_heads": 4, "num_layers": NUM_BLOCKS}
        model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCAB_SIZE, decoder_start_token_id=0)).bfloat16()
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_hidden_layers": NUM_BLOCKS}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB_SIZE)).bfloat16()
    drawn = random.Random(0)
    possible = [(rows, source, target) for rows in range(2, 9) for source in range(16, 97) for target in range(4, 49)]
    of_steps = drawn.sample(possible, NUM_SHAPES[shapes] or num_steps)
    for step in range(num_steps):
        if step == NUM_WARMUP_STEPS:
            first_mib, start_s = 1024 * memory_gib("RssAnon"), time.process_time()
        rows, source, target = of_steps[step % len(of_steps)]
        ids_BS, labels_BT = (torch.randint(3, VOCAB_SIZE, (rows, length)) for length in (source, target))
        labels = labels_BT if model_name == "T5" else ids_BS
        model(input_ids=ids_BS, labels=labels, use_cache=False).loss.backward()
        model.zero_grad()
    steps_per_cpu_s = (num_steps - NUM_WARMUP_STEPS) / (time.process_time() - start_s)
    last_mib = 1024 * memory_gib("RssAnon")
    capacity = int(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024"))
    return {
        "capacity": capacity,
        "first_mib": first_mib,
        "last_mib": last_mib,
        "steps_per_cpu_s": steps_per_cpu_s,
    }


def describe(runs: dict[str, list[Figures]]) -> str:
    """The table of a section; the last line is bounded / default, pair by pair."""
    columns = {"first_mib": 0, "last_mib": 0, "steps_per_cpu_s": 1}
    rows = [
        [
            f"{side}, {runs[side][0]['capacity']:,}",
            *(format_runs(runs[side], key, digits) for key, digits in columns.items()),
        ]
        for side in (DEFAULT, BOUNDED)
    ]
    ratios = [format_ratios(runs[BOUNDED], runs[DEFAULT], key) for key in columns]
    return format_table(["", "MiB at first", "MiB at the end", "steps a CPU second"], [*rows, ["bounded / default", *ratios]])


if __name__ == "__main__":
    main()
