"""TRL's `SFTTrainer` on given rows: trains an epoch, prints one JSON line of figures, knows no toolkit.

`python benchmarks/baselines/sft_trainer.py CONFIG.json`, or with `accelerate launch` in front; the fields of the config are those
of `PeerConfig`. Only the training loop is timed: imports, tokenization, model building and the first, warm-up steps are not.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """One measurement."""

    model_folder: str
    """Config and tokenizer; the weights are random."""
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
    seed: int = 0
    num_warmup_steps: int = 2
    """Steps before the clock starts; then one epoch is timed."""
    fsdp_on_cpu: bool = False
    """Be sharded where the launch asks for FSDP on a CPU: accelerate alone turns that into DDP without a word."""


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
    """TRL's collator; remembers what is in this process's batches. They train in the order they are collated."""

    def __init__(self, collator: Any):
        self.collator = collator
        self.counts: list[tuple[int, int, int, int]] = []
        """Documents, tokens, tokens with a loss, and positions with padding, a batch."""

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collator(rows)
        documents = sum(len(row.get("seq_lengths", [1])) for row in rows)
        tokens = sum(len(row["input_ids"]) for row in rows)
        # A row's first token has no loss; in the middle of a row documents begin with a prompt, which has none either.
        labels = sum(label != -100 for row in rows for label in row["labels"][1:])
        self.counts.append((documents, tokens, labels, batch["input_ids"].numel()))
        return batch


def measure_training(config: PeerConfig) -> dict[str, float]:
    """Documents, tokens (no padding) and label tokens a second over one epoch; the mean loss of all steps."""
    set_seed(config.seed)
    trainer = build_trainer(config)
    steps_per_epoch = math.ceil(len(trainer.train_dataset) / config.batch_size_rows)
    last_step = config.num_warmup_steps + steps_per_epoch
    # Packing decides how many rows there are, and so the steps of an epoch. `logging_steps` makes one mean of all losses.
    trainer.args.max_steps = trainer.args.logging_steps = last_step
    clock = StepClock(config.num_warmup_steps, last_step)
    trainer.add_callback(clock)
    # TRL takes no other collator where it packs, but does not mind one around its own.
    trainer.data_collator = collator = CountingCollator(trainer.data_collator)
    trainer.train()
    seconds = clock.read_s[last_step] - clock.read_s[config.num_warmup_steps]
    counts = torch.tensor(collator.counts[config.num_warmup_steps : last_step]).sum(0)
    if dist.is_initialized():
        dist.all_reduce(counts)
    num_documents, num_tokens, num_labels, num_positions = counts.tolist()
    return {
        "samples_per_s": num_documents / seconds,
        "tokens_per_s": num_tokens / seconds,
        "label_tokens_per_s": num_labels / seconds,
        "seconds": seconds,
        "padding_share": 1 - num_tokens / num_positions,
        "num_steps": steps_per_epoch,
        "num_epoch_tokens": sum(len(ids) for ids in trainer.train_dataset["input_ids"]),
        "loss": [line["loss"] for line in trainer.state.log_history if "loss" in line][-1],
        "is_sharded": any(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters()),
    }


def build_trainer(config: PeerConfig) -> SFTTrainer:
    """TRL's defaults, but for what must be equal on all sides, what would disturb the clock, and `config.options`."""
    on_cpu = not torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=config.work_folder,
        seed=config.seed,
        learning_rate=config.lr,
        max_length=config.max_length_tokens,
        bf16=True,
        use_cpu=on_cpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **config.options,
    )
    arguments.per_device_train_batch_size = config.batch_size_rows // arguments.world_size
    if on_cpu and config.fsdp_on_cpu:
        # accelerate takes FSDP back on a CPU, but does it there when told that this is an accelerator.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        PartialState._shared_state["device"] = torch.device("cpu")
    rows = [json.loads(line) for line in Path(config.rows_file).read_bytes().splitlines()]  # bytes: text splits at U+2028 too
    return SFTTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_folder)),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model_folder),
    )


def main() -> None:
    figures = measure_training(PeerConfig(**json.loads(Path(sys.argv[1]).read_text())))
    if PartialState().is_main_process:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
