"""The comparisons of throughput in `make bench`: who takes part, on which rows, and what is held against what."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.throughput.rows import (
    MAX_LENGTH_TOKENS,
    MAX_SOURCE_TOKENS,
    MAX_TARGET_TOKENS,
    write_llm_data,
    write_pairs,
    write_t5_data,
)
from benchmarks.turns import Side

BATCH_SIZE_ROWS, EVAL_BATCH_SIZE_ROWS = 16, 48
LEARNING_RATE = 1e-3
OURS, BARE = "ours", "bare loop, our batches and forward"
T5_DEFAULTS, T5_MATCHED = "Seq2SeqTrainer, defaults", "Seq2SeqTrainer, matched"
T5_EAGER = f"{T5_MATCHED}, eager attention"
TRL_DEFAULTS = "SFTTrainer, defaults"
DPO_DEFAULTS, DPO_MATCHED = "DPOTrainer, defaults", "DPOTrainer, matched"
PACK_LENGTHS = (512, 2048)


@dataclass(frozen=True, kw_only=True)
class Against:
    """One of our sides held against another one."""

    ours: str
    beside: str
    goal: float | None = None
    """Least ratio of speed."""
    max_overhead: float | None = None
    """Most that our time may exceed the other side's, as a fraction of it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sides that do the same work."""

    title: str
    about: str
    unit: str
    """`rows` or `tokens`: what is counted a second."""
    sides: dict[str, Callable[[], Side]]
    """How each is started."""
    against: list[Against]
    figures: tuple[str, ...] = ()
    """Beside speed, loss and memory."""
    is_training: bool = True


@dataclass
class _Start:
    """Starts sides that write into one folder."""

    folder: Path
    num_threads: int
    count: int = field(default=0)

    def __call__(self, script: str, config: dict[str, Any], *, preset: str | None = None) -> Callable[[], Side]:
        self.count += 1
        file = self.folder / f"side-{self.count}.json"
        file.write_text(json.dumps(config | {"work_folder": self.folder / f"work-{self.count}"}, default=str))
        launch = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{preset}.yaml"] if preset else []
        return lambda: Side([sys.executable, *launch, script, file], num_threads=self.num_threads)

    def recipe(self, script: str, recipe: str, flags: dict[str, Any], **config: Any) -> Callable[[], Side]:
        shared = {
            "model.name_or_path": self.folder / "model",
            "data.source": "jsonl",
            "data.files": [str(self.folder / "train.jsonl")],
            "data.eval_files": [str(self.folder / "eval.jsonl")],
            "data.cache_dir": self.folder / "cache",
            "optim.schedule": "constant",
            "run.output_dir": self.folder / "runs",
            "run.name": f"side-{self.count + 1}",
        }
        flags = {name: str(value) if isinstance(value, Path) else value for name, value in (shared | flags).items()}
        config = {"task": "train", "recipe": recipe, "flags": flags, **config}
        return self(f"benchmarks/throughput/{script}.py", config, preset="single_cpu")


def t5_training(folder: Path, num_threads: int, *, num_rows: int, default_steps: int) -> Comparison:
    """Training steps of a T5 from random weights."""
    write_t5_data(folder, num_rows, 1)
    start, num_steps = _Start(folder, num_threads), num_rows // BATCH_SIZE_ROWS
    flags = _T5_LENGTHS | _TRAINING | {"log_every_steps": num_steps}

    def peer(mode: str, attention: str = "sdpa", steps_per_turn: int = num_steps) -> Callable[[], Side]:
        config = {"task": "train", "mode": mode, "model_folder": folder / "model", "dataset_folder": folder / "train_tokens"}
        options = {"batch_size_rows": BATCH_SIZE_ROWS, "lr": LEARNING_RATE, "steps_per_turn": steps_per_turn}
        return start("benchmarks/baselines/seq2seq_trainer.py", {**config, **options, "attn_implementation": attention})

    return Comparison(
        title="T5, training",
        about=f"""8.4 M parameters from random weights, dropout 0.1; {num_rows} docstrings, sources cut to
{MAX_SOURCE_TOKENS} tokens, batch {BATCH_SIZE_ROWS}. A turn is an epoch, or {default_steps} steps of the defaults, whose batches
are random. Matched: grouped by length, fused AdamW, with sdpa, which is ours too, and with eager attention.""",
        unit="rows",
        sides={
            T5_DEFAULTS: peer("default", steps_per_turn=default_steps),
            T5_MATCHED: peer("matched"),
            T5_EAGER: peer("matched", "eager"),
            BARE: start.recipe("bare", "t5", flags, steps_per_turn=num_steps),
            OURS: start.recipe("ours", "t5", flags, steps_per_turn=num_steps),
        },
        against=[
            Against(ours=OURS, beside=T5_DEFAULTS, goal=3.2),
            Against(ours=OURS, beside=T5_MATCHED, goal=1.4),
            Against(ours=OURS, beside=T5_EAGER),
            Against(ours=OURS, beside=BARE, max_overhead=0.03),
        ],
        figures=("padding_share",),
    )


def t5_evaluation(folder: Path, num_threads: int, *, num_rows: int, weights_steps: int) -> Comparison:
    """Loss, generation and ROUGE of a T5 that the peer has trained a little."""
    write_t5_data(folder, weights_steps * BATCH_SIZE_ROWS, num_rows)
    start, peers_script = _Start(folder, num_threads), "benchmarks/baselines/seq2seq_trainer.py"
    weights = {"task": "train", "mode": "matched", "model_folder": folder / "model", "dataset_folder": folder / "train_tokens"}
    options = {"batch_size_rows": BATCH_SIZE_ROWS, "lr": LEARNING_RATE, "steps_per_turn": weights_steps}
    trainer = start(peers_script, weights | options | {"attn_implementation": "eager", "save_to": folder / "trained"})()
    trainer.take_turn()
    trainer.close()
    flags = _T5_LENGTHS | {
        "model.name_or_path": folder / "trained",
        # Between two evaluations is one step, whose learning rate is too small to move a weight.
        "train.max_steps": 10**4,
        "optim.lr": 1e-20,
        "train.global_batch_size_rows": 2,
        "train.micro_batch_size_rows": 2,
        "eval.every_steps": 1,
        "eval.batch_size_rows": EVAL_BATCH_SIZE_ROWS,
        "eval.max_new_tokens": 48,
        "eval.num_beams": 1,
    }

    def peer(mode: str, attention: str = "sdpa") -> Callable[[], Side]:
        config = {"task": "evaluate", "mode": mode, "model_folder": folder / "trained", "dataset_folder": folder / "eval_tokens"}
        options = {"batch_size_rows": EVAL_BATCH_SIZE_ROWS, "max_new_tokens": 48, "attn_implementation": attention}
        return start(peers_script, config | options)

    return Comparison(
        title="T5, evaluation with generation",
        about=f"""Loss, greedy generation of at most 48 tokens, and ROUGE of {num_rows} rows, all sides with the same
weights; batches of 8 by default, of {EVAL_BATCH_SIZE_ROWS} matched and ours. The Trainer's loss is a mean over batches, ours
over label tokens.""",
        unit="rows",
        sides={
            T5_DEFAULTS: peer("default"),
            T5_MATCHED: peer("matched"),
            T5_EAGER: peer("matched", "eager"),
            OURS: start.recipe("ours", "t5", flags, task="evaluate"),
        },
        against=[
            Against(ours=OURS, beside=T5_DEFAULTS, goal=2.5),
            Against(ours=OURS, beside=T5_MATCHED, goal=4.5),
            Against(ours=OURS, beside=T5_EAGER),
        ],
        figures=("rougeL",),
        is_training=False,
    )


def llm_training(folder: Path, num_threads: int, *, num_rows: int, default_steps: int) -> Comparison:
    """Training steps of a causal model from random weights, packed and not."""
    num_tokens = write_llm_data(folder, num_rows)
    start, num_steps = _Start(folder, num_threads), num_rows // BATCH_SIZE_ROWS

    def peer(**config: Any) -> Callable[[], Side]:
        files = {"model_folder": folder / "model", "rows_file": folder / "train.jsonl"}
        return start("benchmarks/baselines/sft_trainer.py", {"lr": LEARNING_RATE, **files, **config})

    defaults = peer(batch_size_rows=BATCH_SIZE_ROWS, max_length_tokens=MAX_LENGTH_TOKENS, steps_per_turn=default_steps)
    sides, against = {TRL_DEFAULTS: defaults}, []
    for length, goal in zip(PACK_LENGTHS, (4.5, 6.0), strict=True):
        num_packs = max(1, round(BATCH_SIZE_ROWS * num_tokens / num_rows / length))
        flags = _TRAINING | {"data.max_length_tokens": length, "data.packing": True, "log_every_steps": num_steps}
        packing = {"gradient_checkpointing": False, "packing": True, "packing_strategy": "bfd"}
        names = [f"{side}, {length:,}-token packs" for side in (OURS, "SFTTrainer, packed", BARE)]
        sides[names[1]] = peer(options=packing, batch_size_rows=num_packs, max_length_tokens=length)
        sides[names[2]] = start.recipe("bare", "llm", flags, steps_per_turn=num_steps)
        sides[names[0]] = start.recipe("ours", "llm", flags, steps_per_turn=num_steps)
        against += [
            Against(ours=names[0], beside=TRL_DEFAULTS, goal=goal),
            Against(ours=names[0], beside=names[1], goal=goal),
            Against(ours=names[0], beside=names[2], max_overhead=0.03),
        ]
    return Comparison(
        title="LLM, training",
        about=f"""Llama of 8 layers from random weights; {num_rows} docstrings as prompt and completion,
{num_tokens / num_rows:.0f} tokens in the mean and {MAX_LENGTH_TOKENS} at most. A step has {BATCH_SIZE_ROWS} documents, or packs
that hold about as many. A turn is an epoch, or {default_steps} steps of the defaults (gradient checkpointing on, no packing).
TRL's packing (`bfd`) puts all packs of a step into one row under one block mask; its documents do not see each other either. TRL
computes entropy and token accuracy in every step, which cannot be turned off.""",
        unit="tokens",
        sides=sides,
        against=against,
        figures=("padding_share",),
    )


def dpo_training(folder: Path, num_threads: int, *, num_rows: int, default_steps: int) -> Comparison:
    """Training steps of a causal model from random weights on pairs of answers."""
    num_tokens = write_pairs(folder, num_rows)
    start, num_steps = _Start(folder, num_threads), num_rows // BATCH_SIZE_ROWS
    flags = _TRAINING | {"data.max_length_tokens": MAX_LENGTH_TOKENS, "log_every_steps": num_steps}

    def peer(steps_per_turn: int, **options: Any) -> Callable[[], Side]:
        files = {"model_folder": folder / "model", "rows_file": folder / "train.jsonl"}
        sizes = {"batch_size_rows": BATCH_SIZE_ROWS, "max_length_tokens": MAX_LENGTH_TOKENS, "steps_per_turn": steps_per_turn}
        return start("benchmarks/baselines/dpo_trainer.py", {"lr": LEARNING_RATE, "options": options, **files, **sizes})

    return Comparison(
        title="DPO, training",
        about=f"""Llama of 8 layers from random weights; {num_rows} docstrings as prompt and chosen answer, with the
next docstring's summary as the rejected one, {num_tokens / num_rows:.0f} tokens of both documents in the mean. A step has
{BATCH_SIZE_ROWS} pairs. A turn is an epoch, or {default_steps} steps of the defaults, whose reference is computed in each step,
with gradient checkpointing. Matched: the reference computed before, no checkpointing, fused AdamW. TRL pads each batch: its
`padding_free` needs flash attention.""",
        unit="tokens",
        sides={
            DPO_DEFAULTS: peer(default_steps),
            DPO_MATCHED: peer(num_steps, precompute_ref_log_probs=True, gradient_checkpointing=False, optim="adamw_torch_fused"),
            OURS: start.recipe("ours", "dpo", flags, steps_per_turn=num_steps),
        },
        against=[
            Against(ours=OURS, beside=DPO_DEFAULTS, goal=2.0),
            Against(ours=OURS, beside=DPO_MATCHED, goal=1.3),
        ],
        figures=("padding_share",),
    )


_TRAINING = {
    "model.from_scratch": True,
    "train.global_batch_size_rows": BATCH_SIZE_ROWS,
    "train.micro_batch_size_rows": BATCH_SIZE_ROWS,
    "train.max_steps": 10**4,  # the driver ends it
    "eval.at_start": False,
    "eval.generate": False,
    "optim.lr": LEARNING_RATE,
}
_T5_LENGTHS = {"data.max_source_length_tokens": MAX_SOURCE_TOKENS, "data.max_target_length_tokens": MAX_TARGET_TOKENS}
