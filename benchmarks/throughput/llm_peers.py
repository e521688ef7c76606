"""Our LLM recipe beside TRL's `SFTTrainer`: training tokens a second, packed and not, in one process and in two.

Same model, rows, machine, precision and loss (on completions only); the sides run in turn within each repetition, starting
with another one each time, and the ratios are taken within a repetition. One epoch is timed after the warm-up, not the start.
Writes `llm_peers_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.throughput.llm_peers

The rows are docstrings, most of them much shorter than the longest. Tokens are those of the rows trained on, prompts and
completions without padding, counted alike on both sides; a side that saw other tokens in its epoch ends the benchmark.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.measuring import Figures, build_parser, format_ratios, format_runs, format_table, interleave, median, write_report
from benchmarks.throughput.llm_sides import MAX_LENGTH_TOKENS, VOCAB_SIZE, Data, Side, run, write_data

PACKAGES = ["torch", "transformers", "accelerate", "trl", "datasets", "tokenizers"]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH_TOKENS,
    "tie_word_embeddings": False,
}
DIRECT = {"gradient_checkpointing": False}
PACKED = DIRECT | {"packing": True, "packing_strategy": "bfd"}
Pairs = list[tuple[str, str]]


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="llm-peers-") as folder:
        data = write_data(Path(folder), SHAPE, options.num_rows)
        parts = {"single": single_process, "distributed": two_processes}
        sections = [compare(data, options, part, *parts[part](data, options)) for part in options.parts]
    shape = ", ".join(f"{key} {value}" for key, value in SHAPE.items())
    about = f"""; bf16, sdpa.

Llama ({shape}, vocabulary {VOCAB_SIZE}) from random weights; {data.num_rows} docstrings as prompt and completion,
{data.num_tokens / data.num_rows:.0f} tokens in the mean and {MAX_LENGTH_TOKENS} at most; {options.warmup_steps} steps of
warm-up, then one epoch.
Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved; ratios are taken within a repetition."""
    write_report("llm_peers", "recipes/llm.py beside TRL's SFTTrainer", about, sections, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("LLM training beside TRL's SFTTrainer.", parts=["single", "distributed"], repetitions=2)
    parser.add_argument("--num_rows", type=int, default=192, help="training rows at most; one epoch of them is timed")
    parser.add_argument("--batch_size_rows", type=int, default=16, help="documents of a step, packed or not")
    parser.add_argument("--warmup_steps", type=int, default=2)
    return parser.parse_args()


def single_process(data: Data, options: argparse.Namespace) -> tuple[list[Side], Pairs, str]:
    """Sides, pairs of which the first is held against the second, and what the reader has to know."""
    full = options.batch_size_rows  # packed rows: what a user gets who only turns packing on
    packed_rows = packs_per_step(data, options)
    defaults = Side(name="SFTTrainer, defaults (checkpointing)")
    direct = Side(name="SFTTrainer, no checkpointing", options=DIRECT)
    grouped = Side(name="SFTTrainer, grouped by length", options=DIRECT | {"train_sampling_strategy": "group_by_length"})
    packed = Side(name=f"SFTTrainer, packed, {packed_rows} packs", options=PACKED, batch_size_rows=packed_rows)
    packed_full = Side(name=f"SFTTrainer, packed, {full} packs", options=PACKED)
    wrapped = Side(name=f"SFTTrainer, wrapped, {full} packs", options=PACKED | {"packing_strategy": "wrapped"})
    our_packed = Side(name="recipes/llm.py, packed", is_ours=True, options={"data.packing": True})
    our_grouped = Side(name="recipes/llm.py, bucketed by length", is_ours=True, options={"data.packing": False})
    our_direct = Side(
        name="recipes/llm.py, shuffled", is_ours=True, options={"data.packing": False, "data.bucket_by_length": False}
    )
    budget = full * MAX_LENGTH_TOKENS
    group_rows = full * max(1, min(50, data.num_rows // (4 * full)))
    our_packed_full = Side(
        name=f"recipes/llm.py, packed, {budget:,} tokens",
        is_ours=True,
        # A few more packs than the tokens need at least, so that a step is still one micro-batch.
        options={"data.packing": True, "train.global_batch_size_tokens": budget, "train.micro_batch_size_rows": 2 * full},
    )
    sides = [defaults, direct, grouped, packed, packed_full, wrapped, our_packed, our_grouped, our_direct, our_packed_full]
    pairs = [
        (our_packed, defaults),
        (our_packed_full, defaults),
        (our_grouped, defaults),
        (our_packed, packed),
        (our_packed_full, packed_full),
        (our_grouped, grouped),
        (our_direct, direct),
        (our_packed, grouped),
        (our_packed_full, wrapped),
        (our_packed, our_direct),
        (our_packed, our_grouped),
    ]
    note = f"""One process. A step has {full} documents where nothing else is said; {packed_rows} packs of {MAX_LENGTH_TOKENS}
tokens hold about as many, {full} packs ({budget:,} tokens) {full / packed_rows:.1f} times as many. TRL's packing (`bfd`) puts
all packs of a step into one row under one block mask; its documents do not see each other. Its `wrapped` packing cuts documents
anywhere and lets them see each other: another job, here for the figure only. TRL computes entropy and token accuracy in every
step, which cannot be turned off. The Trainer groups by length within {group_rows} rows, we over all rows."""
    return sides, [(ours.name, theirs.name) for ours, theirs in pairs], note


def two_processes(data: Data, options: argparse.Namespace) -> tuple[list[Side], Pairs, str]:
    """As `single_process`."""
    packed_rows = max(2, packs_per_step(data, options) // 2 * 2)
    theirs = Side(name="SFTTrainer", num_processes=2)
    ours = Side(name="recipes/llm.py", is_ours=True, num_processes=2, options={"data.packing": True})
    matched = dataclasses.replace(theirs, options=PACKED, batch_size_rows=packed_rows)
    fsdp2 = {"preset": "fsdp2_cpu"}
    sharded = {**fsdp2, "fsdp_on_cpu": True}
    defaults_fsdp2 = dataclasses.replace(theirs, name="SFTTrainer, defaults, FSDP2", **sharded)
    matched_fsdp2 = dataclasses.replace(matched, name=f"SFTTrainer, packed, {packed_rows} packs, FSDP2", **sharded)
    matched_ddp = dataclasses.replace(matched, name=f"SFTTrainer, packed, {packed_rows} packs, DDP", preset="ddp_cpu")
    our_fsdp2 = dataclasses.replace(ours, name="recipes/llm.py, packed, FSDP2", **fsdp2)
    our_ddp = dataclasses.replace(ours, name="recipes/llm.py, packed, DDP", preset="ddp_cpu")
    sides = [defaults_fsdp2, matched_fsdp2, matched_ddp, our_fsdp2, our_ddp]
    pairs = [(our_fsdp2, defaults_fsdp2), (our_fsdp2, matched_fsdp2), (our_fsdp2, matched_ddp), (our_ddp, matched_ddp)]
    note = f"""Two processes over gloo; a step has {options.batch_size_rows} documents over both, or {packed_rows} packs, which
hold about as many. accelerate makes DDP of FSDP on a CPU; for both sides it is told that the CPU is an accelerator."""
    return sides, [(ours.name, theirs.name) for ours, theirs in pairs], note


def packs_per_step(data: Data, options: argparse.Namespace) -> int:
    """Full packs with about as many tokens as a batch of documents."""
    return max(1, round(options.batch_size_rows * data.num_tokens / data.num_rows / MAX_LENGTH_TOKENS))


def compare(data: Data, options: argparse.Namespace, part: str, sides: list[Side], pairs: Pairs, note: str) -> str:
    """Measure the sides; a section of the report."""
    by_name = {side.name: side for side in sides}

    def measure(side: str, name: str) -> Figures:
        return run(data, by_name[side], name, options.warmup_steps, options.batch_size_rows)

    runs = interleave(measure, list(by_name), options.repetitions, part)
    columns = {"tokens/s": ("tokens_per_s", 0), "label tokens/s": ("label_tokens_per_s", 0), "peak GiB": ("peak_memory_gib", 2)}
    rows = [
        [
            side,
            f"{median(figures, 'num_steps'):.0f}",
            f"{median(figures, 'padding_share'):.0%}" if "padding_share" in figures[0] else "",
            *(format_runs(figures, key, digits) for key, digits in columns.values()),
            f"{median(figures, 'loss'):.2f}",
        ]
        for side, figures in runs.items()
    ]
    ratios = [[ours, beside, format_ratios(runs[ours], runs[beside], "tokens_per_s")] for ours, beside in pairs]
    return f"""## {part.capitalize()}

{note}
Loss: the mean of all steps; it compares sides with the same number of steps. Memory: resident, of one process.

{format_table(["", "steps", "padding", *columns, "loss"], rows)}

How many times as many tokens a second:

{format_table(["", "beside", "times"], ratios)}"""


if __name__ == "__main__":
    main()
