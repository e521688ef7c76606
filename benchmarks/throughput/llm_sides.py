"""The two sides of `llm_peers.py`, on the same rows: each run is a process of its own and ends as a dictionary of figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import REPOSITORY, Figures, as_arguments, read_training, run_script, run_worker
from benchmarks.throughput.t5_sides import load_docstrings

PEER_SCRIPT = REPOSITORY / "benchmarks/baselines/sft_trainer.py"
VOCAB_SIZE, MAX_LENGTH_TOKENS, MAX_COMPLETION_TOKENS = 4096, 512, 64
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Data:
    """Rows as text, which both sides tokenize themselves, beside the model and whatever the runs write."""

    folder: Path
    num_rows: int
    num_tokens: int
    """Of all training rows, with the end tokens."""

    def text(self, split: str) -> Path:
        """JSON lines with `prompt` and `completion`."""
        return self.folder / f"{split}.jsonl"

    @property
    def model(self) -> Path:
        """Config and tokenizer; no weights."""
        return self.folder / "model"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to train."""

    name: str
    is_ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Ours: dotted flags, beside those that all runs have. The peer's: arguments of its `SFTConfig`."""
    batch_size_rows: int | None = None
    """The peer's, where it is not the number of documents of a step: packed rows."""
    preset: str = "single"
    num_processes: int = 1
    fsdp_on_cpu: bool = False
    """The peer's."""


def write_data(folder: Path, shape: dict[str, Any], max_rows: int) -> Data:
    """Write docstrings as prompts and completions that nobody has to cut, and a model folder (`shape`: of `LlamaConfig`)."""
    from transformers import LlamaConfig

    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
    from toolkit.files.json_lines import save_json_lines

    splits = load_docstrings(folder, max_rows, max_eval_rows=8)
    tokenizer = train_byte_level_tokenizer((row[side] for row in splits["train"] for side in row), VOCAB_SIZE)
    num_tokens = 0
    for split, rows in splits.items():
        fitted = [fit(tokenizer, row) for row in rows]
        save_json_lines(folder / f"{split}.jsonl", fitted)
        lengths = [count(tokenizer, row["prompt"] + row["completion"]) + 1 for row in fitted]
        assert max(lengths) <= MAX_LENGTH_TOKENS, "a row was not cut enough"
        num_tokens = sum(lengths) if split == "train" else num_tokens
    data = Data(folder, len(splits["train"]), num_tokens)
    end = tokenizer.eos_token_id
    LlamaConfig(
        **shape, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=end, eos_token_id=end
    ).save_pretrained(data.model)
    tokenizer.save_pretrained(data.model)
    return data


def fit(tokenizer: Any, row: dict[str, str]) -> dict[str, str]:
    """A prompt that ends on a token boundary, a line's, and a completion; cut so that they fit with the end token."""
    completion = cut(tokenizer, row["target"], MAX_COMPLETION_TOKENS)
    # The two others: the line's end and the end token.
    prompt = cut(tokenizer, row["source"], MAX_LENGTH_TOKENS - 2 - count(tokenizer, completion))
    return {"prompt": prompt.rstrip() + "\n", "completion": completion.strip()}


def cut(tokenizer: Any, text: str, max_tokens: int) -> str:
    """The text's first tokens."""
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
    return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def run(data: Data, side: Side, name: str, num_warmup_steps: int, batch_size_rows: int) -> Figures:
    """One run of a side, over one epoch after the warm-up.

    Args:
        batch_size_rows: documents of a step where the side does not say otherwise.

    Returns:
        `samples_per_s` (documents), `tokens_per_s`, `label_tokens_per_s`, `seconds`, `num_steps`, the mean `loss` of all steps,
        `padding_share` where known, and `peak_memory_gib` of the largest process.

    Raises:
        RuntimeError: the side trained on other tokens than the data's.
    """
    figures = (run_ours if side.is_ours else run_peer)(data, side, name, num_warmup_steps, batch_size_rows)
    if figures["num_epoch_tokens"] != data.num_tokens:
        raise RuntimeError(f"{side.name} has {figures['num_epoch_tokens']} tokens an epoch, the rows have {data.num_tokens}")
    return figures


def run_peer(data: Data, side: Side, name: str, num_warmup_steps: int, batch_size_rows: int) -> Figures:
    """One run of `peers/sft_trainer.py`: what it printed, and its peak memory."""
    config = {
        "model_folder": data.model,
        "rows_file": data.text("train"),
        "work_folder": data.folder / name,
        "options": side.options,
        "batch_size_rows": side.batch_size_rows or batch_size_rows,
        "max_length_tokens": MAX_LENGTH_TOKENS,
        "lr": LEARNING_RATE,
        "num_warmup_steps": num_warmup_steps,
        "fsdp_on_cpu": side.fsdp_on_cpu,
    }
    preset = side.preset if side.num_processes > 1 else None
    figures = run_worker(PEER_SCRIPT, config, data.folder / f"{name}.json", preset=preset, num_processes=side.num_processes)
    if side.fsdp_on_cpu and not figures["is_sharded"]:
        raise RuntimeError(f"{side.name} was not sharded")
    return figures


def run_ours(data: Data, side: Side, name: str, num_warmup_steps: int, batch_size_rows: int) -> Figures:
    """One run of `recipes/llm.py`: its `metrics.jsonl`, and its peak memory."""
    from toolkit.tracking.metrics_log import load_metrics

    flags = {
        "model.name_or_path": data.model,
        "model.from_scratch": True,
        "model.attn_implementation": "sdpa",
        "data.source": "jsonl",
        "data.files": data.text("train"),
        "data.eval_files": data.text("eval"),
        "data.max_length_tokens": MAX_LENGTH_TOKENS,
        "data.cache_dir": data.folder / "cache",
        "train.global_batch_size_rows": batch_size_rows,
        "train.micro_batch_size_rows": batch_size_rows // side.num_processes,
        "optim.lr": LEARNING_RATE,
        "eval.at_start": False,
        "eval.generate": False,
        "run.output_dir": data.folder,
        "run.name": name,
        "log_every_steps": num_warmup_steps,
        **side.options,
    }
    # With a budget of tokens steps are not quite full, so that an epoch may end in what stands for the warm-up.
    budget = flags.get("train.global_batch_size_tokens")
    num_steps = math.ceil(data.num_tokens / budget if budget else data.num_rows / batch_size_rows)
    flags["train.max_steps"] = num_warmup_steps + num_steps
    finished = run_script("recipes/llm.py", as_arguments(flags), preset=side.preset, num_processes=side.num_processes)
    lines = [line for line in load_metrics(data.folder / name / "metrics.jsonl") if line["kind"] == "train"]
    epoch = [line["num_tokens"] for line in lines if line["epoch"] == 0]
    return read_training(lines, num_warmup_steps) | {
        "loss": sum(line["loss"] for line in lines) / len(lines),
        "num_steps": len(epoch),
        "num_epoch_tokens": sum(epoch),
        "peak_memory_gib": finished.peak_memory_gib,
    }
