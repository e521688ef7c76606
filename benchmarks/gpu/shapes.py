"""What the parts of `make gpu` train: models with random weights of the real shapes, and rows of random words."""

import dataclasses
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plan.plan_error import llama, t5

Shape = dict[str, Any]
VOCABULARY = 1024
"""Of the tokenizer. Models have their own, larger one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and the steps that it takes."""

    title: str
    model: Shape
    tokens: tuple[int, ...]
    """Most of a row: a document, or source and target."""
    rows: int
    """Rows, or packs, of a rank's step."""
    shares: tuple[float, float] | None
    """Of `tokens`, the shortest and the longest text; None: all rows are full."""
    flags: Shape = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """The recipe that trains it."""
        return "llm" if len(self.tokens) == 1 else "t5"


LORA = {"adapter.method": "lora", "adapter.rank": 16, "adapter.target_modules": "all-linear"}
UNPACKED = {"data.packing": False, "data.loss_on": "all"}
BF16_WEIGHTS = {
    "model.trained_dtype": "bfloat16_stochastic", "optim.name": "adamw_8bit", "train.activation_checkpointing": "selective",
}  # fmt: skip
TINY = {
    "llm": llama(32, 64, 2, 4, 2, VOCABULARY),
    "t5": t5(32, 64, 2, 4) | {"d_kv": 8, "vocab_size": VOCABULARY},
}
_8B: Shape = {"model": llama(4096, 14336, 32, 32, 8, 128256), "tokens": (4096,), "rows": 1, "shares": None}
_T5: Shape = {"tokens": (512, 128), "shares": (0.3, 1.0)}
_1B: Shape = {"model": llama(2048, 8192, 16, 32, 8, 128256, is_tied=True), "tokens": (4096,), "rows": 1, "shares": (0.02, 0.2)}
CASES = {
    "llama-8b-lora": Case(title="Llama 8B, LoRA", flags=LORA | UNPACKED, **_8B),
    "llama-8b-lora-selective": Case(
        title="Llama 8B, LoRA, selective", flags=LORA | UNPACKED | {"train.activation_checkpointing": "selective"}, **_8B
    ),
    "llama-8b-bf16": Case(title="Llama 8B in full, bf16 weights, selective", flags=BF16_WEIGHTS | UNPACKED, **_8B),
    "llama-8b-qlora": Case(title="Llama 8B, QLoRA", flags=LORA | UNPACKED | {"adapter.base_dtype": "nf4"}, **_8B),
    "llama-1b": Case(title="Llama 1.2B, packed", flags={"data.packing": True}, **_1B),
    "t5-base": Case(title="T5-base", model=t5(768, 3072, 12, 12), rows=32, **_T5),
    "t5-base-cudnn": Case(
        title="T5-base, cuDNN's attention", model=t5(768, 3072, 12, 12), rows=32, flags={"model.cudnn_attention": True}, **_T5
    ),
    "t5-large": Case(title="T5-large", model=t5(1024, 4096, 24, 16), rows=16, **_T5),
    "t5-3b": Case(title="T5-3B", model=t5(1024, 16384, 24, 32) | {"d_kv": 128}, rows=8, **_T5),
}


def find_case(name: str, *, small: bool) -> Case:
    """The case of this name; if `small`, with a tiny model and short rows."""
    case = CASES[name]
    if not small:
        return case
    tokens = tuple(number // 16 for number in case.tokens)
    return dataclasses.replace(case, model=TINY[case.recipe], tokens=tokens, rows=min(case.rows, 4))


def write_inputs(case: Case, num_steps: int, folder: Path, *, num_words: int = 2000) -> Any:
    """Write `rows.jsonl` for so many steps, and `model/` with tokenizer and config; returns the tokenizer."""
    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
    from toolkit.files.json_lines import save_json_lines

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(num_words)]
    tokenizer = train_byte_level_tokenizer([" ".join(words)], VOCABULARY)
    tokens_per_word = len(tokenizer(" ".join(words))["input_ids"]) / len(words)

    def text(most_tokens: int) -> str:
        # A word is a token or more, so that a full row has more than fit: a completion is cut at the maximum length.
        share = 1.0 if case.shares is None else draw.uniform(*case.shares) / tokens_per_word
        return " ".join(draw.choices(words, k=max(1, int(most_tokens * share))))

    of_pack = 2 / sum(case.shares) if case.flags.get("data.packing") and case.shares else 1  # a pack holds several
    names = ("prompt", "completion") if case.recipe == "llm" else ("source", "target")
    num_rows = int(num_steps * case.rows * of_pack) + 1
    prompts = [
        [" ".join(draw.choices(words, k=3))] * (case.recipe == "llm") for _ in range(num_rows)
    ]  # rows of one prompt stay together
    rows = [[*prompt, *map(text, case.tokens)] for prompt in prompts]
    save_json_lines(folder / "rows.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "model").mkdir()
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(case.model | special))
    return tokenizer


def list_flags(case: Case, folder: Path, weights: Path | None, num_ranks: int = 1) -> Shape:
    """A run's flags for the rows and the model of `folder`, with the weights of another folder or random ones."""
    sides = ("",) if case.recipe == "llm" else ("source_", "target_")
    return {
        "model.name_or_path": str(weights or folder / "model"),
        "model.from_scratch": weights is None,
        "data.source": "jsonl",
        "data.files": str(folder / "rows.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "data.eval_fraction": 0,
        **{f"data.max_{side}length_tokens": tokens for side, tokens in zip(sides, case.tokens, strict=True)},
        "train.global_batch_size_rows": case.rows * num_ranks,
        "train.micro_batch_size_rows": case.rows,
        "optim.schedule": "constant",
        "optim.lr": 1e-4,
        "eval.at_start": False,
        "run.output_dir": str(folder / "runs"),
        **case.flags,
    }


def random_weights(case: Case, inputs: Path, folder: Path, dtype: str) -> Path:
    """A folder in `folder` with weights for the model of `inputs`, drawn on the GPU if there is one; made if it is not there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = folder / f"{case.model['model_type']}-{case.model.get('hidden_size') or case.model['d_model']}-{dtype}"
    if made.is_dir():
        return made
    beside = made.with_suffix(".tmp")  # a part that is killed leaves no half of it under its name
    shutil.copytree(inputs / "model", beside, dirs_exist_ok=True)
    auto_class: Any = AutoModelForCausalLM if case.recipe == "llm" else AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto_class.from_config(AutoConfig.from_pretrained(beside), dtype=getattr(torch, dtype))
    model.save_pretrained(beside)
    os.replace(beside, made)
    return made
