"""The two sides of `t5_peers.py`, on the same rows: each run is a process of its own and ends as a dictionary of figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import REPOSITORY, Figures, as_arguments, read_training, run_script, run_worker

PEER_SCRIPT = REPOSITORY / "benchmarks/baselines/seq2seq_trainer.py"
MIN_BODY_CHARACTERS = 120  # as the held-out rows; one-line docstrings would be no summarization
VOCAB_SIZE, MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS = 4096, 512, 64


@dataclass(frozen=True)
class Data:
    """Rows as text (ours) and as token ids (the peer's) in one folder, beside the models and whatever the runs write."""

    folder: Path
    num_train_rows: int
    num_eval_rows: int

    def text(self, split: str) -> Path:
        """JSON lines with `source` and `target`."""
        return self.folder / f"{split}.jsonl"

    def tokens(self, split: str) -> Path:
        """A saved dataset with `input_ids` and `labels`."""
        return self.folder / f"{split}_tokens"

    def model(self, name: str) -> Path:
        """Config and tokenizer, weights where it was trained."""
        return self.folder / name


def write_data(folder: Path, shapes: dict[str, dict[str, Any]], max_train_rows: int, max_eval_rows: int) -> Data:
    """Write docstrings as both sides read them, and a model folder for every shape (fields of `T5Config`)."""
    from datasets import Dataset
    from transformers import T5Config

    from toolkit.data.tokens.tokenizer import train_tokenizer
    from toolkit.files.json_lines import save_json_lines

    splits = load_docstrings(folder, max_train_rows, max_eval_rows)
    rows = Dataset.from_list(splits["train"]).rename_columns({"source": "prompt", "target": "completion"})
    tokenizer = train_tokenizer(rows, VOCAB_SIZE)
    data = Data(folder, len(splits["train"]), len(splits["eval"]))
    for split, texts in splits.items():
        save_json_lines(data.text(split), texts)
        sources = tokenizer([row["source"] for row in texts], truncation=True, max_length=MAX_SOURCE_TOKENS)
        targets = tokenizer([row["target"] for row in texts], truncation=True, max_length=MAX_TARGET_TOKENS)
        ids = {"input_ids": sources["input_ids"], "labels": targets["input_ids"]}
        Dataset.from_dict(ids).save_to_disk(data.tokens(split))
    for name, shape in shapes.items():
        T5Config(**shape, vocab_size=len(tokenizer), pad_token_id=0, decoder_start_token_id=0).save_pretrained(data.model(name))
        tokenizer.save_pretrained(data.model(name))
    return data


def load_docstrings(folder: Path, max_train_rows: int, max_eval_rows: int) -> dict[str, list[dict[str, str]]]:
    """Docstrings with a body, `source` and `target`, of the splits `train` and `eval`; `folder` takes a cache."""
    from toolkit.config.data import DataConfig
    from toolkit.data.rows.load import load_rows

    rows = load_rows(DataConfig(source="recipes/sources/docstrings.py:load_rows", cache_dir=str(folder / "cache")))
    long_enough = rows.train.filter(lambda row: len(row["lead_text"]) >= MIN_BODY_CHARACTERS)
    train, evaluation = (
        [{"source": row["prompt"], "target": row["completion"]} for row in split] for split in (long_enough, rows.evaluation)
    )
    return {"train": evenly_spaced(train, max_train_rows), "eval": evenly_spaced(evaluation, max_eval_rows)}


def evenly_spaced(rows: list[dict[str, str]], most: int) -> list[dict[str, str]]:
    """All rows, or `most` of them spread over the whole list."""
    num_rows = min(most, len(rows))
    return [rows[i * len(rows) // num_rows] for i in range(num_rows)]


def run_peer(data: Data, name: str, **config: Any) -> Figures:
    """One run of `peers/seq2seq_trainer.py`: what it printed, and its peak memory.

    Args:
        config: fields of its `PeerConfig`, but for `work_folder`.
    """
    return run_worker(PEER_SCRIPT, config | {"work_folder": data.folder / name}, data.folder / f"{name}.json")


@dataclass(frozen=True, kw_only=True)
class OurRun:
    """One run of `recipes/t5.py`."""

    data: Data
    name: str
    model: str
    """Name of its folder in `data`."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Dotted flags, beside those that all runs here have."""
    preset: str = "single"
    num_processes: int = 1
    num_warmup_steps: int = 0
    """Steps left out of the training figures."""


def run_ours(run: OurRun) -> Figures:
    """Run the recipe and read its `metrics.jsonl`.

    Returns:
        `samples_per_s`, `tokens_per_s`, `seconds`, `loss` of training after the warm-up; `eval_rows_per_s`, `eval_loss` and
        `eval_rouge…` of the evaluations after the first, which warms up; `training_memory_gib` as the run tells it, and
        `peak_memory_gib`, the largest resident memory of one of its processes from start to end.
    """
    from toolkit.tracking.metrics_log import load_metrics

    flags = {
        "model.name_or_path": run.data.model(run.model),
        "model.attn_implementation": "sdpa",  # flags of a run may say otherwise
        "data.source": "jsonl",
        "data.files": run.data.text("train"),
        "data.eval_files": run.data.text("eval"),
        "data.max_source_length_tokens": MAX_SOURCE_TOKENS,
        "data.max_target_length_tokens": MAX_TARGET_TOKENS,
        "data.cache_dir": run.data.folder / "cache",
        "run.output_dir": run.data.folder,
        "run.name": run.name,
        "log_every_steps": 5,
        **run.flags,
    }
    finished = run_script("recipes/t5.py", as_arguments(flags), preset=run.preset, num_processes=run.num_processes)
    lines = load_metrics(run.data.folder / run.name / "metrics.jsonl")
    return read_training(lines, run.num_warmup_steps) | read_evaluation(lines) | {"peak_memory_gib": finished.peak_memory_gib}


def read_evaluation(lines: list[dict[str, Any]]) -> Figures:
    """Figures of the `eval` lines after the first; none where there was one evaluation."""
    timed = [line for line in lines if line["kind"] == "eval"][1:]
    if not timed:
        return {}
    figures = {f"eval_{key}": timed[-1][key] for key in ("loss", "rouge1", "rouge2", "rougeL", "rougeLsum")}
    return figures | {"eval_rows_per_s": statistics.harmonic_mean([line["rows_per_s"] for line in timed])}
