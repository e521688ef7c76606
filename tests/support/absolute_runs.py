"""Runs of the recipes that `plain_pytorch.py` can follow, on tiny models; inputs and references are made once a process."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tests.planting.plant import NO_FAULT
from tests.support import plain_pytorch as plain
from tests.support.launch import run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, build_model_folders, make_rows, save_jsonl
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, as_flags

NUM_ROWS, NUM_EVAL_ROWS, BATCH_ROWS = 70, 7, 16
"""An epoch is four steps of 16 rows and one of 6; evaluation batches of 4 leave 3 rows over."""
RANK, LABEL_SMOOTHING = 4, 0.2

KINDS: dict[str, tuple[str, str, list[str]]] = {
    "t5": ("t5", "t5", ["--train.micro_batch_size_rows=3"]),
    "llama": (
        "llm", "llama",
        ["--train.micro_batch_size_rows=1", "--data.packing=true", "--data.max_length_tokens=96",
         f"--optim.label_smoothing={LABEL_SMOOTHING}"],
    ),
    "lora": (
        "llm", "llama",
        ["--train.micro_batch_size_rows=3", "--data.packing=false", "--data.max_length_tokens=96", "--adapter.method=lora",
         f"--adapter.rank={RANK}", f"--adapter.alpha={plain.LORA_SCALE * RANK}"],
    ),
    "end_pads": (
        "llm", "end_pads",
        ["--train.micro_batch_size_rows=3", "--data.packing=false", "--data.max_length_tokens=96"],
    ),
}  # fmt: skip
"""Recipe, model family and flags. The last one's padding token is its end token, which texts also hold."""


@functools.cache
def inputs() -> Path:
    """Folder with the models, and rows for both recipes with evaluation rows apart."""
    folder = Path(tempfile.mkdtemp(prefix="absolute-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run_on_ranks(_build_models, preset="single", overrides=FP32, args=(folder,), env=NO_FAULT)
    rows = make_rows(NUM_ROWS + NUM_EVAL_ROWS, seed=1)
    ends = [("</s> " * (place % 5 == 0), "</s> " * (place % 3 == 0)) for place in range(len(rows))]
    prompts = [
        {"prompt": inside + row["source"], "completion": f" {also}{row['target']}"}
        for row, (inside, also) in zip(rows, ends, strict=True)
    ]
    for name, these in (("t5", rows), ("llm", prompts)):
        save_jsonl(folder / f"{name}-eval.jsonl", these[:NUM_EVAL_ROWS])
        save_jsonl(folder / f"{name}-train.jsonl", these[NUM_EVAL_ROWS:])
    return folder


def _build_models(parent: Path) -> None:
    from transformers import AutoTokenizer

    # ReLU would turn the last bit of an activation that is nearly 0 into 1e-3 of the gradient.
    t5 = {"t5": (FAMILIES["t5"][0], FAMILIES["t5"][1] | {"feed_forward_proj": "gated-gelu"})}
    llama = {"llama": CAUSAL_FAMILIES["llama"]}
    with patch.dict(FAMILIES, t5, clear=True), patch.dict(CAUSAL_FAMILIES, llama, clear=True):
        build_model_folders(parent)
    shutil.copytree(parent / "llama", parent / "end_pads")
    tokenizer = AutoTokenizer.from_pretrained(parent / "llama")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(parent / "end_pads")


def run_recipe(kind: str, preset: str, output: Path) -> Path:
    """One run of the recipe as it stands, on every rank; returns its folder, which also has the adapter that it began with."""
    run_ranks(kind, preset, output, FP32, [], train_on_rank)
    return output / f"{kind}-{preset}"


def run_ranks(kind: str, preset: str, output: Path, overrides: dict, more_flags: list[str], function: Callable) -> list:
    """What `function(recipe, argv, run folder)` returns on every rank."""
    recipe, family, flags = KINDS[kind]
    folder, name = inputs(), f"{kind}-{preset}"
    values = {
        "model.name_or_path": folder / family,
        "model.dropout": 0,
        "data.source": "jsonl",
        "data.files": folder / f"{recipe}-train.jsonl",
        "data.eval_files": folder / f"{recipe}-eval.jsonl",
        "data.cache_dir": folder / "cache",
        "train.max_steps": plain.NUM_STEPS,
        "train.global_batch_size_rows": BATCH_ROWS,
        "optim.lr": plain.LR,
        "optim.beta1": plain.BETA1,
        "optim.beta2": plain.BETA2,
        "optim.eps": plain.EPS,
        "optim.weight_decay": plain.WEIGHT_DECAY,
        "optim.warmup_steps": plain.WARMUP_STEPS,
        "optim.max_grad_norm": plain.MAX_GRAD_NORM,
        "eval.batch_size_rows": 4,
        "eval.num_beams": plain.NUM_BEAMS,
        "eval.no_repeat_ngram_size": plain.NO_REPEAT_NGRAM_SIZE,
        "eval.max_new_tokens": plain.MAX_NEW_TOKENS,
        "log_every_steps": 1,
        "log_row_ids": True,
        "run.output_dir": output,
        "run.name": name,
    }
    args = (recipe, [*as_flags(values), *flags, *more_flags], output / name)
    return run_on_ranks(function, preset=preset, overrides=overrides, args=args)


def train_on_rank(recipe: str, argv: list[str], folder: Path) -> None:
    """On every rank: the recipe as it stands; a new adapter's weights are written before the first step."""
    from toolkit.training import loop

    train = loop.train

    def note_adapter_and_train(run) -> None:
        if run.config.adapter.method != "none":
            _save_adapter(run.sharded.model, folder / "first_adapter.safetensors")
        train(run)

    with patch.object(loop, "train", note_adapter_and_train):
        run_in_this_process(recipe, argv)


def _save_adapter(model, path: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor

    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trained.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file({name.removesuffix(".default.weight"): p.clone() for name, p in whole.items()}, path)
