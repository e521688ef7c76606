"""Small, exact runs of the recipes for the invariants: fp32, dropout 0, tiny models."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.support.launch import REPOSITORY, Running, start_on_ranks
from tests.support.model_folders import save_jsonl
from toolkit.files.json_lines import load_json_lines

RELATIVE_TOLERANCE = 1e-5
NUM_STEPS = 6
WORDS = ["read", "write", "open", "close", "file", "path", "line", "text", "word", "count", "sort", "join", "split", "load"]
NUM_ROWS = 80  # with 16 rows a step and about 10 % held out, an epoch ends inside the run, with a smaller batch
# No ReLU: it turns the last bit of an input that is nearly 0 into 2e-5 of a gradient, on CPUs whose kernels round that way.
T5_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4,
    "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 256, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True, "tie_word_embeddings": True,
}  # fmt: skip


def write_inputs(folder: Path, config: dict = T5_CONFIG) -> None:
    """A model folder with nothing but a config, and rows of very different lengths."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    texts = draw_texts(NUM_ROWS, (3, 60), (1, 12))
    save_jsonl(folder / "rows.jsonl", [{"source": source, "target": target} for source, target in texts])


def draw_texts(num_rows: int, *num_words: tuple[int, int], words: Sequence[str] = WORDS) -> list[list[str]]:
    """Rows of texts, each of at least so many words and fewer than so many; the first begins with the row's number."""
    random = np.random.Generator(np.random.PCG64(0))
    drawn = [[" ".join(random.choice(words, int(random.integers(*most)))) for most in num_words] for _ in range(num_rows)]
    return [[f"{row} {first}", *others] for row, (first, *others) in enumerate(drawn)]


Finished = tuple[list[dict[str, Any]], list[dict[str, np.ndarray]]]
"""The lines of a run's metrics.jsonl, and each rank's whole first-step gradients."""


def run_recipes(folder: Path, runs: dict[str, dict]) -> dict[str, Finished]:
    """Several runs by name. Those under the same preset share a launch, one after another.

    Two launches are under way at a time: ranks that wait for each other leave a core idle.

    Args:
        runs: of each, `preset` and `overrides` of the launch; `flags`, put behind those of all runs, so they win; `recipe`, and
            `rows`, the name of their file; `max_logits`, most elements of a chunk of a causal model's logits; `function` that
            ranks call instead of `train_and_record_gradients`.
    """
    launches = {}
    for name, how in runs.items():
        launches.setdefault(json.dumps([how["preset"], how["overrides"]]), {})[name] = how
    with ExitStack() as stack:
        started = (stack.enter_context(_start(folder, of_launch)) for of_launch in launches.values())
        ended = [running.results() for running, _ in pairwise(chain(started, [None])) if running]
    recorded: dict[str, list[dict[str, np.ndarray]]] = {}
    for of_launch, of_ranks in zip(launches.values(), ended, strict=True):
        recorded |= zip(of_launch, map(list, zip(*of_ranks, strict=True)), strict=True)
    return {name: (load_json_lines(folder / "runs" / name / "metrics.jsonl"), recorded[name]) for name in runs}


def _start(folder: Path, runs: dict[str, dict]) -> Running:
    """All in one launch, whose preset is that of the first."""
    first = next(iter(runs.values()))
    calls = [
        (
            how.get("function", train_and_record_gradients),
            (how.get("recipe", "t5"), _argv(folder, name, how), how.get("max_logits", 2**26)),
        )
        for name, how in runs.items()
    ]
    overrides = {"mixed_precision": "no", **first["overrides"]}
    return start_on_ranks(_call_each, preset=first["preset"], overrides=overrides, args=(calls,))


def _call_each(calls: list[tuple[Callable, tuple]]) -> list:
    return [function(*args) for function, args in calls]


def _argv(folder: Path, name: str, how: dict) -> list[str]:
    rows = folder / how.get("rows", "rows.jsonl")
    return [
        "--model.dropout", "0",
        "--data.source", "jsonl", "--data.files", str(rows), "--data.cache_dir", str(folder / "cache"),
        "--data.eval_fraction", "0.1", "--train.max_steps", str(NUM_STEPS), "--train.global_batch_size_rows", "16",
        "--optim.lr", "1e-3", "--optim.weight_decay", "0.1",
        "--optim.max_grad_norm", "1.0", "--eval.max_new_tokens", "6", "--log_row_ids", "true",
        "--run.output_dir", str(folder / "runs"), "--run.name", name, *how["flags"],
    ]  # fmt: skip


def train_and_record_gradients(recipe: str, argv: list[str], max_logits: int) -> dict[str, np.ndarray]:
    """On every rank: the recipe as it stands, with a look at the gradients of step 1 before they are clipped."""
    from toolkit.models.patches import chunked_loss

    recorded: dict[str, np.ndarray] = {}
    look = before_clipping(lambda model: recorded or recorded.update(whole_gradients(model)))
    with look, patch.object(chunked_loss, "MAX_LOGITS_AT_ONCE", max_logits):
        run_in_this_process(recipe, argv)
    return recorded


@contextmanager
def before_clipping(look: Callable[[Any], object]) -> Iterator[None]:
    """Context in which a step's model is looked at before its gradients are clipped."""
    from toolkit.training import loop

    clip = loop.clip_gradients

    def look_and_clip(model, *rest):
        look(model)
        return clip(model, *rest)

    with patch.object(loop, "clip_gradients", look_and_clip):
        yield


def train_without_export(recipe: str, argv: list[str], max_logits: int) -> dict[str, np.ndarray]:
    """On every rank: the same, for runs whose export nobody looks at."""
    with without_export():
        return train_and_record_gradients(recipe, argv, max_logits)


@contextmanager
def without_export() -> Iterator[None]:
    """Context in which a run ends after its training."""
    from toolkit.training import finetune
    from toolkit.training.run import leave

    with patch.object(finetune, "finish", lambda run: leave(run.trackers)):
        yield


def run_in_this_process(recipe: str, argv: list[str]) -> None:
    """The recipe as it stands, in this rank, where the caller may have changed what it imports."""
    path = REPOSITORY / "recipes" / f"{recipe}.py"
    with patch.object(sys, "argv", [str(path), *argv]):
        runpy.run_path(str(path), run_name="__main__")


def figures(lines: list[dict], kind: str) -> dict[str, np.ndarray]:
    chosen = [line for line in lines if line["kind"] == kind]
    return {name: np.array([line[name] for line in chosen]) for name in chosen[0]}


def check_curve(lines: list[dict], expected: list[dict], names: Sequence[str] = ("loss", "grad_norm")) -> None:
    """All steps are there, with these figures of another run."""
    actual, wanted = figures(lines, "train"), figures(expected, "train")
    assert actual["step"].tolist() == list(range(1, NUM_STEPS + 1))
    for name in names:
        np.testing.assert_allclose(actual[name], wanted[name], rtol=RELATIVE_TOLERANCE, err_msg=name)


def check_gradients(of_ranks: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray]) -> None:
    """Each rank recorded the gradients of another run."""
    for gradients in of_ranks:
        check_arrays(gradients, expected)


def check_arrays(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """These and no others were found, each compared relative to its norm."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        difference = np.linalg.norm(found[name] - array) / max(np.linalg.norm(array), 1e-12)
        assert difference <= RELATIVE_TOLERANCE, f"{name}: {difference:.1e}"


def whole_gradients(model) -> dict[str, np.ndarray]:
    """Gradients by clean parameter name, gathered."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from toolkit.parallel.units import clean_name

    def whole(gradient) -> np.ndarray:
        return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().clone().numpy()

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            return {clean_name(name): whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    named = {clean_name(name).removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
    return {name: whole(p.grad) for name, p in named.items()}
