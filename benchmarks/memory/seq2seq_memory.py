"""Peak memory of training an encoder-decoder with mT5's vocabulary: `recipes/t5.py` beside transformers' `Seq2SeqTrainer`.

The model is small, so that the logits are what counts; both take the same rows in the same batches, bf16, AdamW. Writes
`seq2seq_memory_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.seq2seq_memory
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import (
    REPOSITORY,
    Figures,
    as_arguments,
    build_parser,
    format_ratios,
    format_runs,
    format_table,
    interleave,
    num_cores,
    run_script,
    write_report,
)
from benchmarks.turns import Side
from toolkit.files.json_lines import load_json_lines

PACKAGES = ["torch", "transformers", "accelerate"]
VOCAB_SIZE = 250_112  # mT5's
SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SOURCE_TOKENS, TARGET_TOKENS, NUM_STEPS = 128, 128, 3
THEIRS, OURS = "Seq2SeqTrainer", "recipes/t5.py"


def main() -> None:
    parser = build_parser("Peak memory of training with mT5's vocabulary.", repetitions=3)
    parser.add_argument("--batch_size_rows", type=int, default=16)
    options = parser.parse_args()
    num_rows = options.batch_size_rows
    with tempfile.TemporaryDirectory(prefix="seq2seq-memory-") as name:
        folder = Path(name)
        write_inputs(folder, num_rows * NUM_STEPS)

        def measure(side: str, run: str) -> Figures:
            return {"peak_gib": (train_ours if side == OURS else train_theirs)(folder, run, num_rows)}

        runs = interleave(measure, [THEIRS, OURS], options.repetitions, "training")
    rows = [[side, format_runs(figures, "peak_gib", 2)] for side, figures in runs.items()]
    logits_gib = num_rows * TARGET_TOKENS * VOCAB_SIZE * 4 / 2**30
    about = f"""; bf16.

Peak resident memory of training an mT5 for {NUM_STEPS} steps of {num_rows} rows, each of {SOURCE_TOKENS} source and
{TARGET_TOKENS} target tokens, in one process. The model is small (width {SHAPE["d_model"]}), so that the
logits (once in fp32: {logits_gib:.2f} GiB) are what counts.

Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved; ratios are taken within a repetition.

{format_table(["", "peak GiB"], rows)}

The Trainer's peak, times ours: {format_ratios(runs[THEIRS], runs[OURS], "peak_gib")}. The goal is 3."""
    write_report("seq2seq_memory", "Memory of an encoder-decoder with 250,112 tokens", about, [], packages=PACKAGES)


def write_inputs(folder: Path, num_rows: int) -> None:
    """`rows.jsonl`, the same rows as ids, and a model's config and tokenizer. Every row is longer than what is taken of it."""
    from datasets import Dataset
    from transformers import MT5Config

    from toolkit.data.tokens.tokenizer import train_tokenizer
    from toolkit.files.json_lines import save_json_lines

    texts = [{"source": f"{i} source words " * 200, "target": f"{i} target words " * 200} for i in range(num_rows)]
    tokenizer = train_tokenizer(
        Dataset.from_dict({"prompt": [row["source"] for row in texts], "completion": [row["target"] for row in texts]}), 300
    )
    save_json_lines(folder / "rows.jsonl", texts)
    sources = tokenizer([row["source"] for row in texts], truncation=True, max_length=SOURCE_TOKENS)
    targets = tokenizer([row["target"] for row in texts], truncation=True, max_length=TARGET_TOKENS)
    assert {len(ids) for ids in targets["input_ids"]} == {TARGET_TOKENS}
    Dataset.from_dict({"input_ids": sources["input_ids"], "labels": targets["input_ids"]}).save_to_disk(folder / "tokens")
    pad = tokenizer.pad_token_id
    ids = {"pad_token_id": pad, "eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": pad}
    MT5Config(**SHAPE, vocab_size=VOCAB_SIZE, **ids).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def train_theirs(folder: Path, run: str, num_rows: int) -> float:
    """Peak GiB of one turn of `baselines/seq2seq_trainer.py`."""
    config = {
        "task": "train",
        "mode": "default",
        "bf16": True,
        "model_folder": folder / "model",
        "dataset_folder": folder / "tokens",
        "work_folder": folder / run,
        "batch_size_rows": num_rows,
        "steps_per_turn": NUM_STEPS,
    }
    file = folder / f"{run}.json"
    file.write_text(json.dumps(config, default=str))
    side = Side([sys.executable, REPOSITORY / "benchmarks/baselines/seq2seq_trainer.py", file], num_threads=num_cores())
    side.take_turn()
    return side.close()


def train_ours(folder: Path, run: str, num_rows: int) -> float:
    """Peak GiB of the steps of a run of the recipe."""

    flags = {
        "model.name_or_path": folder / "model",
        "model.from_scratch": True,
        "data.source": "jsonl",
        "data.files": [str(folder / "rows.jsonl")],
        "data.eval_fraction": 0,
        "data.max_source_length_tokens": SOURCE_TOKENS,
        "data.max_target_length_tokens": TARGET_TOKENS,
        "data.cache_dir": folder / "cache",
        "train.global_batch_size_rows": num_rows,
        "train.micro_batch_size_rows": num_rows,
        "train.max_steps": NUM_STEPS,
        "run.output_dir": folder,
        "run.name": run,
    }
    run_script("recipes/t5.py", as_arguments(flags), preset="single")
    lines = load_json_lines(folder / run / "metrics.jsonl", skip_torn_end=True)  # the run restarts the system's count
    return max(line["peak_memory_gib"] for line in lines if line["kind"] == "train")


if __name__ == "__main__":
    main()
