"""TRL's `DPOTrainer` on given pairs: trains in turns, knows no toolkit.

`python benchmarks/baselines/dpo_trainer.py CONFIG.json`; the fields of the config are those of `PeerConfig`, without an adapter,
and `rows_file` has `prompt`, `chosen` and `rejected`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer

from benchmarks.baselines.sft_trainer import PeerConfig, TrainingTurns
from benchmarks.turns import Turns


class CountingCollator:
    """TRL's collator; remembers what is in its batches. They train in the order they are collated."""

    def __init__(self, collator: Any):
        self.collator = collator
        self.counts: list[tuple[int, int, int]] = []
        """Pairs, tokens of both documents, and positions with padding, a batch."""

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collator(rows)
        self.counts.append((len(rows), int(batch["attention_mask"].sum()), batch["input_ids"].numel()))
        return batch


def main() -> None:
    config = PeerConfig(**json.loads(Path(sys.argv[1]).read_text()))
    turns = Turns()
    turns.begin()  # the first turn, which warms up, has the start in it, and the reference's pass if it is computed before
    set_seed(config.seed)
    arguments = DPOConfig(
        output_dir=config.work_folder,
        seed=config.seed,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=config.batch_size_rows,
        max_length=config.max_length_tokens,
        bf16=torch.cuda.is_available(),  # on CPUs both sides compute in fp32
        use_cpu=not torch.cuda.is_available(),
        max_steps=10**6,  # the driver ends it
        logging_steps=config.steps_per_turn,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **config.options,
    )
    rows = [json.loads(line) for line in Path(config.rows_file).read_bytes().splitlines()]  # bytes: text splits at U+2028 too
    weights = Path(config.work_folder) / "weights"  # from which TRL loads the reference too
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_folder)).save_pretrained(weights)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model_folder),
    )
    trainer.data_collator = collator = CountingCollator(trainer.data_collator)
    trainer.add_callback(TrainingTurns(turns, collator, config.steps_per_turn))
    trainer.train()


if __name__ == "__main__":
    main()
