"""TRL's `SFTTrainer` on given rows: trains in turns, knows no toolkit.

`python benchmarks/baselines/sft_trainer.py CONFIG.json`; the fields of the config are those of `PeerConfig`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from benchmarks.turns import Turns


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """One measurement."""

    model_folder: str
    """Config and tokenizer; without an adapter the weights are random."""
    rows_file: str
    """JSON lines with `prompt` and `completion`."""
    work_folder: str
    """Where the Trainer may write."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `SFTConfig`, on top of those that are equal in all measurements."""
    batch_size_rows: int = 16
    """Rows of a step, over all processes; packed ones, if they are."""
    max_length_tokens: int = 512
    lr: float = 1e-3
    adapter: dict[str, Any] | None = None
    """Arguments of peft's `LoraConfig`, on the weights of `model_folder` in bf16."""
    seed: int = 0
    steps_per_turn: int | None = None
    """None: an epoch, whose number of steps packing decides."""


class TrainingTurns(TrainerCallback):
    """Ends a turn whenever the Trainer logs: every `steps_per_turn` steps, with the mean loss since the last time."""

    def __init__(self, turns: Turns, collator: CountingCollator, steps_per_turn: int):
        self.turns, self.collator, self.steps_per_turn = turns, collator, steps_per_turn

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        counts = torch.tensor(self.collator.counts[state.global_step - self.steps_per_turn : state.global_step])
        documents, tokens, positions = counts.sum(0).tolist()
        self.turns.end(rows=documents, tokens=tokens, padding_share=1 - tokens / positions, loss=logs["loss"])
        self.turns.begin()


class CountingCollator:
    """TRL's collator; remembers what is in this process's batches. They train in the order they are collated."""

    def __init__(self, collator: Any):
        self.collator = collator
        self.counts: list[tuple[int, int, int]] = []
        """Documents, tokens, and positions with padding, a batch."""

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collator(rows)
        documents = sum(len(row.get("seq_lengths", [1])) for row in rows)
        tokens = sum(len(row["input_ids"]) for row in rows)
        self.counts.append((documents, tokens, batch["input_ids"].numel()))
        return batch


def train(config: PeerConfig, turns: Turns) -> None:
    """Train in turns; their documents, tokens (no padding) and mean loss."""
    set_seed(config.seed)
    trainer = build_trainer(config)
    # Packing decides how many rows there are, and so the steps of an epoch.
    steps_per_turn = config.steps_per_turn or math.ceil(len(trainer.train_dataset) / config.batch_size_rows)
    trainer.args.max_steps, trainer.args.logging_steps = 10**6, steps_per_turn  # the driver ends it
    # TRL takes no other collator where it packs, but does not mind one around its own.
    trainer.data_collator = collator = CountingCollator(trainer.data_collator)
    trainer.add_callback(TrainingTurns(turns, collator, steps_per_turn))
    trainer.train()


def build_trainer(config: PeerConfig) -> SFTTrainer:
    """TRL's defaults, except for what must be equal on all sides, what would disturb the clock, and `config.options`."""
    arguments = SFTConfig(
        output_dir=config.work_folder,
        seed=config.seed,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=config.batch_size_rows,
        max_length=config.max_length_tokens,
        bf16=torch.cuda.is_available(),  # on CPUs both sides compute in fp32
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **config.options,
    )
    rows = [json.loads(line) for line in Path(config.rows_file).read_bytes().splitlines()]  # bytes: text splits at U+2028 too
    if config.adapter is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(config.model_folder, dtype=torch.bfloat16)
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model_folder),
        peft_config=None if config.adapter is None else LoraConfig(task_type="CAUSAL_LM", **config.adapter),
    )


def main() -> None:
    turns = Turns()
    turns.begin()  # the first turn, which warms up, has the start in it
    train(PeerConfig(**json.loads(Path(sys.argv[1]).read_text())), turns)


if __name__ == "__main__":
    main()
