"""transformers' `Seq2SeqTrainer` on given data: trains or evaluates, prints one JSON line of figures, knows no toolkit.

`python benchmarks/baselines/seq2seq_trainer.py CONFIG.json`; the fields of the config are those of `PeerConfig`.
Only the training loop, or whole evaluations, are timed: imports, model loading and the first, warm-up steps are not.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import load_from_disk
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

ROUGE_KEYS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """One measurement."""

    task: Literal["train", "evaluate"]
    mode: Literal["default", "matched"]
    """`default`: the Trainer's defaults with our model, batch and precision; `matched`: length grouping and what else is free."""
    model_folder: str
    """Config and tokenizer; weights too for `evaluate`. `train` draws random ones."""
    dataset_folder: str
    """`datasets.save_to_disk` folder with `input_ids` and `labels`."""
    work_folder: str
    """Where the Trainer may write."""
    bf16: bool = True
    seed: int = 0
    batch_size_rows: int = 16
    lr: float = 1e-3
    num_warmup_steps: int = 5
    """Steps before the clock starts."""
    num_steps: int = 100
    """Steps timed."""
    save_to: str | None = None
    """Folder for the trained model."""
    num_evaluations: int = 2
    """Evaluations timed, after one that is not."""
    max_new_tokens: int = 48
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    """Of `matched`; transformers' default is sdpa too."""


class StepClock(TrainerCallback):
    """Reads the clock at the end of the last warm-up step and of the last step."""

    def __init__(self, first_step: int, last_step: int):
        self.first_step, self.last_step = first_step, last_step
        self.read_s: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.first_step, self.last_step):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.read_s[state.global_step] = time.perf_counter()


class CountingCollator:
    """The library's collator; remembers rows and tokens of every batch. Batches train in the order they are collated."""

    def __init__(self, collator: DataCollatorForSeq2Seq):
        self.collator = collator
        self.num_rows: list[int] = []
        self.num_tokens: list[int] = []
        self.num_positions: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        # Counted before the collator pads the rows in place.
        self.num_rows.append(len(rows))
        self.num_tokens.append(sum(len(row["input_ids"]) + len(row["labels"]) for row in rows))
        batch = self.collator(rows)
        self.num_positions.append(batch["input_ids"].numel() + batch["labels"].numel())
        return batch


def measure_training(config: PeerConfig) -> dict[str, float]:
    """Rows and tokens (sources and labels, no padding) a second over `num_steps` steps; the loss the Trainer ends with."""
    last_step = config.num_warmup_steps + config.num_steps
    options = {"default": {"logging_steps": last_step}, "matched": {"logging_steps": 10, **matched_options()}}[config.mode]
    set_seed(config.seed)
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.from_pretrained(config.model_folder),
        **({"attn_implementation": config.attn_implementation} if config.mode == "matched" else {}),
    )
    clock = StepClock(config.num_warmup_steps, last_step)
    collator = CountingCollator(DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(config.model_folder), model=model))
    trainer = Seq2SeqTrainer(
        model=model,
        args=build_arguments(config, max_steps=last_step, per_device_train_batch_size=config.batch_size_rows, **options),
        train_dataset=load_from_disk(config.dataset_folder),
        data_collator=collator,
        callbacks=[clock],
    )
    trainer.train()
    if config.save_to:
        trainer.save_model(config.save_to)
        AutoTokenizer.from_pretrained(config.model_folder).save_pretrained(config.save_to)
    timed = slice(config.num_warmup_steps, last_step)
    seconds = clock.read_s[last_step] - clock.read_s[config.num_warmup_steps]
    num_tokens = sum(collator.num_tokens[timed])
    return {
        "samples_per_s": sum(collator.num_rows[timed]) / seconds,
        "tokens_per_s": num_tokens / seconds,
        "seconds": seconds,
        "padding_share": 1 - num_tokens / sum(collator.num_positions[timed]),
        "loss": [line["loss"] for line in trainer.state.log_history if "loss" in line][-1],
    }


def measure_evaluation(config: PeerConfig) -> dict[str, float]:
    """Rows a second of `evaluate` with loss, generation and ROUGE; the figures themselves, to see that both sides agree."""
    options: dict[str, Any] = {}  # The default: batches of 8 in the data's order.
    if config.mode == "matched":
        options = {"per_device_eval_batch_size": config.batch_size_rows, **matched_options()}
    tokenizer = AutoTokenizer.from_pretrained(config.model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(config.model_folder, dtype=torch.float32)
    rows = load_from_disk(config.dataset_folder)
    trainer = Seq2SeqTrainer(
        model=model,
        args=build_arguments(config, predict_with_generate=True, **options),
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=lambda evaluated: score_rouge(evaluated, tokenizer),
    )
    seconds = []
    for _ in range(1 + config.num_evaluations):
        start_s = time.perf_counter()
        figures = trainer.evaluate(max_new_tokens=config.max_new_tokens, num_beams=config.num_beams)
        seconds.append(time.perf_counter() - start_s)
    mean_s = sum(seconds[1:]) / config.num_evaluations
    return {
        "eval_rows_per_s": len(rows) / mean_s,
        "seconds": mean_s,
        **{f"eval_{key}": figures[f"eval_{key}"] for key in ["loss", *ROUGE_KEYS]},
    }


def matched_options() -> dict[str, Any]:
    """What a knowing user of the Trainer would set for speed."""
    # The fused AdamW is the Trainer's own default since torch 2.8; named, so that it stays so.
    return {"train_sampling_strategy": "group_by_length", "optim": "adamw_torch_fused", "dataloader_pin_memory": False}


def build_arguments(config: PeerConfig, **options: Any) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments: its defaults, but for what must be equal on all sides and what would disturb the clock."""
    return Seq2SeqTrainingArguments(
        output_dir=config.work_folder,
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.lr,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def score_rouge(evaluated: Any, tokenizer: Any) -> dict[str, float]:
    """Mean F-measure in percent, as the library's summarization example computes it."""
    scorer = RougeScorer(ROUGE_KEYS, use_stemmer=True)
    texts = [
        tokenizer.batch_decode(np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        for ids in (evaluated.label_ids, evaluated.predictions)
    ]
    scores = [scorer.score(reference, prediction) for reference, prediction in zip(*texts, strict=True)]
    return {key: 100 * float(np.mean([score[key].fmeasure for score in scores])) for key in ROUGE_KEYS}


def main() -> None:
    config = PeerConfig(**json.loads(Path(sys.argv[1]).read_text()))
    figures = {"train": measure_training, "evaluate": measure_evaluation}[config.task](config)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
