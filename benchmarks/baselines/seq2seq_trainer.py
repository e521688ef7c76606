"""transformers' `Seq2SeqTrainer` on given data: trains or evaluates in turns, knows no toolkit.

`python benchmarks/baselines/seq2seq_trainer.py CONFIG.json`; the fields of the config are those of `PeerConfig`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
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

from benchmarks.turns import Turns

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
    bf16: bool = field(default_factory=torch.cuda.is_available)
    """On CPUs both sides compute in fp32."""
    seed: int = 0
    batch_size_rows: int = 16
    lr: float = 1e-3
    steps_per_turn: int = 100
    """Of `train`. A turn of `evaluate` is a whole evaluation."""
    save_to: str | None = None
    """Folder for the model, which then trains for one turn."""
    max_new_tokens: int = 48
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    """Of `matched`; transformers' default is sdpa too."""


class TrainingTurns(TrainerCallback):
    """Ends a turn whenever the Trainer logs: every `steps_per_turn` steps, with the mean loss since the last time."""

    def __init__(self, turns: Turns, collator: CountingCollator, steps_per_turn: int):
        self.turns, self.collator, self.steps_per_turn = turns, collator, steps_per_turn

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:  # the last line, at the end of the training, has none
            timed = slice(state.global_step - self.steps_per_turn, state.global_step)
            tokens, positions = (sum(counts[timed]) for counts in (self.collator.num_tokens, self.collator.num_positions))
            figures = {"rows": sum(self.collator.num_rows[timed]), "tokens": tokens, "padding_share": 1 - tokens / positions}
            self.turns.end(**figures, loss=logs["loss"])
            self.turns.begin()


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


def train(config: PeerConfig, turns: Turns) -> None:
    """Train in turns of `steps_per_turn` steps; their rows, tokens (sources and labels, no padding) and mean loss."""
    options = {"default": {}, "matched": matched_options()}[config.mode]
    set_seed(config.seed)
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.from_pretrained(config.model_folder),
        **({"attn_implementation": config.attn_implementation} if config.mode == "matched" else {}),
    )
    collator = CountingCollator(DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(config.model_folder), model=model))
    trainer = Seq2SeqTrainer(
        model=model,
        args=build_arguments(
            config,
            max_steps=config.steps_per_turn if config.save_to else 10**6,  # the driver ends it
            logging_steps=config.steps_per_turn,
            per_device_train_batch_size=config.batch_size_rows,
            **options,
        ),
        train_dataset=load_from_disk(config.dataset_folder),
        data_collator=collator,
        callbacks=[] if config.save_to else [TrainingTurns(turns, collator, config.steps_per_turn)],
    )
    trainer.train()
    if config.save_to:
        trainer.save_model(config.save_to)
        AutoTokenizer.from_pretrained(config.model_folder).save_pretrained(config.save_to)
        turns.end()


def evaluate(config: PeerConfig, turns: Turns) -> None:
    """Evaluate in turns, with loss, generation and ROUGE; the figures show that both sides do the same work."""
    options: dict[str, Any] = {}  # The default: batches of 8 in the data's order.
    if config.mode == "matched":
        options = {"per_device_eval_batch_size": config.batch_size_rows, **matched_options()}
    tokenizer = AutoTokenizer.from_pretrained(config.model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        config.model_folder,
        dtype=torch.float32,
        **({"attn_implementation": config.attn_implementation} if config.mode == "matched" else {}),
    )
    rows = load_from_disk(config.dataset_folder)
    trainer = Seq2SeqTrainer(
        model=model,
        args=build_arguments(config, predict_with_generate=True, **options),
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=lambda evaluated: score_rouge(evaluated, tokenizer),
    )
    while True:
        figures = trainer.evaluate(max_new_tokens=config.max_new_tokens, num_beams=config.num_beams)
        turns.end(rows=len(rows), loss=figures["eval_loss"], rougeL=figures["eval_rougeL"])
        turns.begin()


def matched_options() -> dict[str, Any]:
    """What a knowing user of the Trainer would set for speed."""
    # The fused AdamW is the Trainer's own default since torch 2.8; named, so that it stays so.
    pins = torch.cuda.is_available()
    return {"train_sampling_strategy": "group_by_length", "optim": "adamw_torch_fused", "dataloader_pin_memory": pins}


def build_arguments(config: PeerConfig, **options: Any) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments: its defaults, except for what must be equal on all sides and what would disturb the clock."""
    return Seq2SeqTrainingArguments(
        output_dir=config.work_folder,
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
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
    turns = Turns()
    turns.begin()  # the first turn, which warms up, has the start in it
    {"train": train, "evaluate": evaluate}[config.task](config, turns)


if __name__ == "__main__":
    main()
