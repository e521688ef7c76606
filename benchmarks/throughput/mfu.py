"""Tokens a second and MFU of one LLM and one T5 on this machine's GPUs, beside published figures. Weights are random.

Without a GPU: small models on 2 processes, to try the command; the share of a peak is not computed then. Writes
`mfu_<hardware>_<date>.md` into `benchmarks/results/`, and the base of an adapter, 15 GiB, into a folder below `TMPDIR`. No run
saves or exports. Every row is full, which is checked: published figures are of full rows.

    python -m benchmarks.throughput.mfu

The run counts FLOPs and MFU itself (`toolkit/tracking/flops.py`, which has the formula and the GPUs' peaks).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import as_arguments, build_parser, format_table, read_training, run_script, write_report
from benchmarks.plan.plan_error import LLAMA_8B, llama, t5
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking.flops import find_peak_tflops

PACKAGES = ["torch", "transformers", "accelerate", "peft"]
NUM_WARMUP_STEPS, NUM_STEPS = 5, 10
"""A line of the log has the mean time of the steps since the last one, so both are multiples of the steps between two."""
MFU_COLUMN = 4
Shape = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model to train for a few steps."""

    name: str
    recipe: str
    model: Shape
    flags: Shape
    tokens: tuple[int, ...]
    """Of a row: a pack, or source and target; all rows are full."""
    rows: int
    """Of a rank's step."""
    published: str

    @property
    def has_adapter(self) -> bool:
        """Whether the model is a frozen base."""
        return "adapter.method" in self.flags


LORA = {"adapter.method": "lora", "adapter.rank": 16, "model.frozen_dtype": "bfloat16", "adapter.target_modules": "all-linear"}
GPU_CASES = [
    Case("Llama 8B, LoRA", "llm", LLAMA_8B, LORA, (4096,), 1, "12,473, 402 TFLOP/s (NeMo Automodel, 1 H100)"),
    Case("T5-3B, full", "t5", t5(1024, 16384, 24, 32) | {"d_kv": 128}, {}, (512, 128), 8, "13,846 (NeMo, 8 A100)"),
]
ON_8_GPUS = Case("Llama 8B, full", "llm", LLAMA_8B, {}, (4096,), 1, "5,762 to 8,532 (torchtitan, 8 H100)")
CPU_CASES = [
    Case("Llama 5M, LoRA", "llm", llama(256, 640, 4, 4, 2, 4096), LORA, (256,), 2, "-"),
    Case("T5 5M, full", "t5", t5(128, 512, 4, 2), {}, (128, 32), 2, "-"),
]


def main() -> None:
    options = build_parser("Tokens a second and MFU of one LLM and one T5.", parts=["llm", "t5"]).parse_args()
    rows, section = describe(options.parts)
    write_report("mfu", "Tokens a second and MFU", "; bf16.", [section], packages=PACKAGES)
    print(judge([row[MFU_COLUMN] for row in rows]))


def judge(cells: list[str]) -> str:
    """The last line, from the cells of the column MFU.

    Raises:
        SystemExit: a GPU cannot have been so fast, or nothing was measured.
    """
    shares = [float(cell.rstrip("%")) for cell in cells if cell != "-"]
    if not cells or max(shares, default=0) >= 100:
        sys.exit(f"FAILED: an MFU of {max(shares):.1f} % is impossible" if shares else "FAILED: nothing was measured")
    return f"{len(cells)} measured, MFU {', '.join(cells)}"


def describe(parts: list[str]) -> tuple[list[list[str]], str]:
    """Train the cases of these recipes; the rows of a table, and a section of a report with it."""
    import torch

    num_gpus = torch.cuda.device_count()
    peak = find_peak_tflops(torch.cuda.get_device_name(0)) if num_gpus else None
    rows = []
    for case in [*GPU_CASES, *([ON_8_GPUS] if num_gpus >= 8 else [])] if num_gpus else CPU_CASES:
        if case.recipe in parts:
            with tempfile.TemporaryDirectory(prefix="mfu-") as folder:
                rows.append(measure(case, max(1, num_gpus), bool(num_gpus), peak, Path(folder)))
                print(" | ".join(rows[-1]), flush=True)
    known = f"{peak} TFLOP/s a GPU, its data sheet's dense bf16" if peak else "this device's is not known"
    columns = ["", "preset", "tokens/s a GPU", "TFLOP/s a GPU", "MFU", "peak GiB", "published tokens/s a GPU"]
    return (
        rows,
        f"""## Beside published figures

Random weights, {NUM_STEPS} steps after {NUM_WARMUP_STEPS}. The formula stands in `toolkit/tracking/flops.py`. Peak: {known}.
Published figures are of other code and other settings.

{format_table(columns, rows)}""",
    )


def measure(case: Case, num_ranks: int, on_gpus: bool, peak_tflops: int | None, folder: Path) -> list[str]:
    """Train the case; a row of the table.

    Raises:
        RuntimeError: rows were not full.
    """
    write_inputs(case, num_ranks, on_gpus, folder)
    preset = ("fsdp2_full_shard" if num_ranks > 1 else "single") if on_gpus else "fsdp2_cpu"
    num_ranks = num_ranks if on_gpus else 2
    lengths = (
        ("data.max_length_tokens",)
        if case.recipe == "llm"
        else ("data.max_source_length_tokens", "data.max_target_length_tokens")
    )
    flags = {
        "model.name_or_path": folder / "model",
        "model.from_scratch": not case.has_adapter,
        "data.source": "jsonl",
        "data.files": folder / "rows.jsonl",
        "data.eval_fraction": 0,
        "data.cache_dir": folder / "cache",
        **({"data.packing": False, "data.loss_on": "all"} if case.recipe == "llm" else {}),  # all rows are full
        **dict(zip(lengths, case.tokens, strict=True)),
        "train.global_batch_size_rows": case.rows * num_ranks,
        "train.micro_batch_size_rows": case.rows,
        "train.max_steps": NUM_WARMUP_STEPS + NUM_STEPS,
        "eval.at_start": False,
        "run.output_dir": folder,
        "run.name": "run",
        "log_every_steps": NUM_WARMUP_STEPS,
        **case.flags,
    }
    recipe = [f"recipes/{case.recipe}.py", *as_arguments(flags)]
    run_script("benchmarks/throughput/mfu_side.py", recipe, preset=preset, num_processes=num_ranks)
    lines = load_json_lines(folder / "run" / "metrics.jsonl", skip_torn_end=True)
    figures = read_training(lines, NUM_WARMUP_STEPS)
    if (length := figures["tokens_per_s"] / figures["samples_per_s"]) < 0.999 * sum(case.tokens):
        raise RuntimeError(f"{case.name}: rows have {length:.1f} tokens on average, not {sum(case.tokens)}")
    tflops, mfu = "-", "-"
    if peak_tflops:
        timed = [line for line in lines if line["kind"] == "train" and line["step"] > NUM_WARMUP_STEPS]
        share = statistics.fmean(line["mfu_percent"] for line in timed)
        tflops, mfu = f"{share / 100 * peak_tflops:.3g}", f"{share:.1f}%"
    cells = [f"{figures['tokens_per_s'] / num_ranks:,.0f}", tflops, mfu, f"{figures['training_memory_gib']:.1f}"]
    return [case.name, f"{preset}, {num_ranks} ranks", *cells, case.published]


def build_model(case: Case, device: str, **options: Any) -> Any:
    """The case's model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    settings = dict(case.model)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    auto_class: Any = AutoModelForCausalLM if case.recipe == "llm" else AutoModelForSeq2SeqLM
    with torch.device(device):
        return auto_class.from_config(config, **options)


def write_inputs(case: Case, num_ranks: int, on_gpus: bool, folder: Path) -> None:
    """Write a model folder, for an adapter with weights in bf16, and rows of more random words than fit into them."""
    import torch

    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
    from toolkit.files.json_lines import save_json_lines

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2000)]
    tokenizer = train_byte_level_tokenizer([" ".join(words)], 1024)
    num_rows = case.rows * max(2, num_ranks) * (NUM_WARMUP_STEPS + NUM_STEPS)

    def text(num_tokens: int) -> str:
        return " ".join(draw.choices(words, k=num_tokens))  # a word is a token or more

    if case.recipe == "llm":
        # Completions are cut at the maximum length; texts would be split, and every second row be shorter than it.
        rows = [{"prompt": words[0], "completion": text(case.tokens[0])} for _ in range(num_rows)]
    else:
        rows = [dict(zip(("source", "target"), map(text, case.tokens), strict=True)) for _ in range(num_rows)]
    save_json_lines(folder / "rows.jsonl", rows)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "model").mkdir()
    if case.has_adapter:
        build_model(case, "cuda" if on_gpus else "cpu", dtype=torch.bfloat16).save_pretrained(folder / "model")
        torch.cuda.empty_cache()  # the run is another process
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(case.model | special))


if __name__ == "__main__":
    main()
