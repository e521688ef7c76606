"""What our adapter checkpoints and our loss over a large vocabulary save: bytes, blocking time, resident memory.

A LoRA checkpoint of `recipes/llm.py` beside `Accelerator.save_state` of the same adapter (peft) on the same base, both under
FSDP2 with 2 processes; and one forward and backward with the loss in chunks beside transformers' own loss and TRL's.
Writes `llm_memory_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.llm_memory
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    Figures,
    as_arguments,
    build_parser,
    format_ratios,
    format_runs,
    format_table,
    interleave,
    median,
    run_script,
    run_worker,
    write_report,
)
from toolkit.files.json_lines import load_json_lines

PACKAGES = ["torch", "transformers", "accelerate", "peft", "trl"]
PRESET, NUM_PROCESSES = "fsdp2_cpu", 2
VOCAB_SIZE = 16_000  # of the base under the adapters
ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear layers, rank 16": {"target_modules": "all-linear", "rank": 16},
    "q_proj and v_proj, rank 8 (peft's defaults)": {"target_modules": ["q_proj", "v_proj"], "rank": 8},
}
THEIRS, OURS = "Accelerator.save_state", "recipes/llm.py"
LOSSES = {"transformers' loss, whole logits": "plain", "TRL's fused head": "trl", "ours, in chunks": "chunked"}


def main() -> None:
    options = parse_options()
    comparisons = {"checkpoint": compare_checkpoints, "loss": compare_losses}
    sections = [comparisons[part](options) for part in options.parts]
    about = f"""; bf16.

Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved; ratios are taken within a repetition."""
    write_report("llm_memory", "Adapter checkpoints and the loss's memory", about, sections, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Adapter checkpoints and the loss's memory.", parts=["checkpoint", "loss"], repetitions=2)
    parser.add_argument("--hidden_size", type=int, default=768, help="of the base under the adapters")
    parser.add_argument("--num_layers", type=int, default=12, help="of the base under the adapters")
    parser.add_argument("--vocab_size", type=int, default=131_072, help="of the loss")
    parser.add_argument("--num_tokens", type=int, default=4096, help="of the loss's batch")
    return parser.parse_args()


def compare_checkpoints(options: argparse.Namespace) -> str:
    """Bytes and blocking time of adapter checkpoints; a section of the report."""
    with tempfile.TemporaryDirectory(prefix="llm-memory-") as name:
        folder = Path(name)
        write_base(folder, options)
        sides = {f"{side}, {adapter}": (side, adapter) for adapter in ADAPTERS for side in (THEIRS, OURS)}

        def measure(side: str, name: str) -> Figures:
            who, adapter = sides[side]
            return (save_ours if who == OURS else save_theirs)(folder, name, **ADAPTERS[adapter])

        runs = interleave(measure, list(sides), options.repetitions, "checkpoint")
    rows = []
    for side, (who, adapter) in sides.items():
        ours = runs[f"{OURS}, {adapter}"]
        ratios = ["" if who == OURS else format_ratios(runs[side], ours, key, 1) for key in ("megabytes", "blocking_s")]
        rows.append([side, f"{median(runs[side], 'megabytes'):,.1f}", format_runs(runs[side], "blocking_s", 2), *ratios])
    num_parameters = median(runs[next(iter(sides))], "num_parameters") / 1e6
    return f"""## Adapter checkpoints

Llama of {num_parameters:.0f} M parameters with the larger adapter (hidden size {options.hidden_size}, {options.num_layers}
layers, vocabulary {VOCAB_SIZE:,}), base in bf16, adapter and AdamW's moments in fp32; FSDP2, {NUM_PROCESSES} processes. So a
base parameter costs `save_state` 2 bytes, and an adapter's costs both sides 12: the larger the base beside its adapter, the
more there is to save. Blocking: the median of a run's three saves, each until all processes go on. Ours are hashed and
synchronized to the disk before they count as written; `save_state` returns once the system has the bytes.

{format_table(["", "MB", "blocking s", "bytes, times ours", "blocking, times ours"], rows)}"""


def write_base(folder: Path, options: argparse.Namespace) -> None:
    """A model with random weights in bf16, a tokenizer, and a few rows to train on."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
    from toolkit.files.json_lines import save_json_lines

    rows = [{"prompt": f"Row {i}:\n", "completion": "some words"} for i in range(32)]
    tokenizer = train_byte_level_tokenizer((text for row in rows for text in row.values()), 300)
    config = LlamaConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.num_layers,
        num_attention_heads=max(1, options.hidden_size // 64),
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=128,
        tie_word_embeddings=False,  # save_state writes a tied weight twice
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    save_json_lines(folder / "rows.jsonl", rows)


def save_theirs(folder: Path, name: str, target_modules: list[str] | str, rank: int) -> Figures:
    """One run of `peers/save_state.py`."""
    config = {"model_folder": folder / "base", "work_folder": folder / name, "target_modules": target_modules, "rank": rank}
    script, file = "benchmarks/baselines/save_state.py", folder / f"{name}.json"
    figures = run_worker(script, config, file, preset=PRESET, num_processes=NUM_PROCESSES)
    return {
        "megabytes": figures["num_bytes"] / 1e6,
        "blocking_s": statistics.median(figures["blocking_s"]),
        "num_trainable": figures["num_trainable"],
        "num_parameters": figures["num_parameters"],
    }


def save_ours(folder: Path, name: str, target_modules: list[str] | str, rank: int) -> Figures:
    """One run of the recipe with a checkpoint after each of three steps."""

    flags = {
        "model.name_or_path": folder / "base",
        "data.source": "jsonl",
        "data.files": folder / "rows.jsonl",
        "data.max_length_tokens": 64,
        "data.cache_dir": folder / "cache",
        "adapter.method": "lora",
        "adapter.target_modules": target_modules,
        "adapter.rank": rank,
        "adapter.alpha": 2 * rank,
        "train.global_batch_size_rows": 4,
        "train.micro_batch_size_rows": 2,
        "train.max_steps": 3,
        "checkpoint.every_steps": 1,
        "eval.at_start": False,
        "eval.generate": False,
        "eval.num_rows": 1,
        "run.output_dir": folder,
        "run.name": name,
    }
    run_script("recipes/llm.py", as_arguments(flags), preset=PRESET, num_processes=NUM_PROCESSES)
    saves = [
        line for line in load_json_lines(folder / name / "metrics.jsonl", skip_torn_end=True) if line["kind"] == "checkpoint"
    ]
    return {
        "megabytes": saves[-1]["num_bytes"] / 1e6,
        "blocking_s": statistics.median(line["blocking_s"] for line in saves),
    }


def compare_losses(options: argparse.Namespace) -> str:
    """Resident memory of one forward and backward; a section of the report."""

    def measure(side: str, name: str) -> Figures:
        arguments = [LOSSES[side], str(options.vocab_size), str(options.num_tokens)]
        figures = run_script("benchmarks/memory/loss_memory.py", arguments).figures
        return figures | {"above_gib": figures["peak_gib"] - figures["before_gib"]}

    runs = interleave(measure, list(LOSSES), options.repetitions, "loss")
    columns = {"peak GiB": ("peak_gib", 2), "above the model, GiB": ("above_gib", 2), "seconds": ("seconds", 1)}
    rows = [
        [
            side,
            *(format_runs(figures, key, digits) for key, digits in columns.values()),
            f"{median(figures, 'loss'):.4f}",
            f"{median(figures, 'grad_norm'):.4f}",
        ]
        for side, figures in runs.items()
    ]
    logits_gib = options.vocab_size * options.num_tokens * 4 / 2**30
    return f"""## Memory of the loss

One forward and backward of {options.num_tokens:,} label tokens with a vocabulary of {options.vocab_size:,} in one process; the
model is small, so that the logits (once in fp32: {logits_gib:.2f} GiB) are what counts. Above the model: peak resident memory
less that before the step, so gradients are in it. Loss and gradient norm show that all do the same.

{format_table(["", *columns, "loss", "gradient norm"], rows)}"""


if __name__ == "__main__":
    main()
