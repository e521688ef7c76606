"""A run is that of plain PyTorch, from text to exported weights: `tests/support/plain_pytorch.py` follows it without the toolkit.

Other tests compare the toolkit with itself; what is wrong everywhere alike shows only here.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.planting.plant import NO_FAULT
from tests.support import absolute_runs
from tests.support.absolute_runs import BATCH_ROWS, KINDS, NUM_EVAL_ROWS, NUM_ROWS, inputs, run_ranks, run_recipe
from tests.support.launch import run_on_ranks
from tests.support.own_models import loaded_by_transformers, own_class
from tests.support.plain_pytorch import MAX_GRAD_NORM, NUM_STEPS, Figures, train_plain
from tests.support.same_runs import rows_by_step
from tests.support.small_run import check_arrays, figures, run_in_this_process
from tests.support.workbench import FP32
from toolkit.files.json_lines import load_json_lines

FIGURE_TOLERANCE = 1e-6
STEPS_AN_EPOCH = -(-NUM_ROWS // BATCH_ROWS)
TRAINING_ROWS = range(NUM_EVAL_ROWS, NUM_EVAL_ROWS + NUM_ROWS)
"""Row ids count through the files, that with the evaluation rows first."""


@pytest.mark.parametrize("preset", ["single", "fsdp2_cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_run_is_that_of_plain_pytorch(tmp_path, kind, preset):
    run = run_recipe(kind, preset, tmp_path)
    steps = rows_by_step(run)
    check_rows(steps)
    check_run(run, follow(kind, tuple(tuple(steps[step]) for step in sorted(steps)), first_adapter(run)))


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_run_of_a_users_class_that_changes_the_logits_of_its_parent_is_too(tmp_path, kind):
    recipe, family, _ = KINDS[kind]
    flags = ["--optim.label_smoothing=0", f"--eval.unshard={'auto' if kind == 't5' else 'never'}"]
    run_ranks(kind, "fsdp2_cpu", tmp_path, FP32, flags, train_own_class)
    run = tmp_path / f"{kind}-fsdp2_cpu"
    steps = rows_by_step(run)
    args = (recipe, inputs() / family, *rows_of(recipe, [steps[step] for step in sorted(steps)]))
    check_run(run, run_on_ranks(follow_own_class, preset="single", overrides=FP32, args=args, env=NO_FAULT)[0])


def check_run(run: Path, expected: Figures) -> None:
    lines = load_json_lines(run / "metrics.jsonl")
    train, evaluated = figures(lines, "train"), figures(lines, "eval")
    assert max(expected.grad_norms) > 1.2 * min(expected.grad_norms) > 1.2 * MAX_GRAD_NORM, (
        "clipping should act, now more, now less"
    )
    for figure, values in (("learning_rate", expected.lrs), ("loss", expected.losses), ("grad_norm", expected.grad_norms)):
        np.testing.assert_allclose(train[figure], values, rtol=FIGURE_TOLERANCE, err_msg=f"{figure} of a step")
    exported = {rename(name): array for file in (run / "export").glob("*.safetensors") for name, array in load_file(file).items()}
    check_arrays(exported, {name: weight.numpy() for name, weight in expected.weights.items()})
    np.testing.assert_allclose(evaluated["loss"], expected.eval_losses, rtol=FIGURE_TOLERANCE, err_msg="evaluation loss")
    assert expected.eval_accuracies[-1] > 0
    np.testing.assert_allclose(evaluated["token_accuracy"], expected.eval_accuracies, err_msg="token accuracy")
    for step, texts in zip((0, NUM_STEPS), expected.texts, strict=True):
        predictions = {line["row_id"]: line["prediction"] for line in load_json_lines(run / f"predictions-{step}.jsonl")}
        assert predictions == dict(enumerate(texts)), "generated texts"


@functools.cache
def follow(kind: str, steps: tuple[tuple[int, ...], ...], adapter: bytes | None) -> Figures:
    """The reference for these rows of the steps, on one process, which no planted fault reaches."""
    recipe, family, _ = KINDS[kind]
    args = (inputs() / family, *rows_of(recipe, steps), adapter, absolute_runs.LABEL_SMOOTHING if kind == "llama" else 0.0)
    return run_on_ranks(train_plain, preset="single", overrides=FP32, args=args, env=NO_FAULT)[0]


def follow_own_class(recipe: str, *args) -> Figures:
    with loaded_by_transformers(recipe):
        return train_plain(*args, None, 0.0)


def train_own_class(recipe: str, argv: list[str], folder: Path) -> None:
    """On every rank: the recipe as it stands, whose `finetune` is given the class."""
    from toolkit.training import finetune

    train = finetune.finetune
    with patch.object(finetune, "finetune", lambda config: train(config, model=own_class(recipe))):
        run_in_this_process(recipe, argv)


def rows_of(recipe: str, steps: Sequence[Sequence[int]]) -> tuple[list[list], list]:
    evaluation, train = (load_json_lines(inputs() / f"{recipe}-{name}.jsonl") for name in ("eval", "train"))
    return [[train[row - NUM_EVAL_ROWS] for row in step] for step in steps], evaluation


def check_rows(steps: dict[int, list[int]]) -> None:
    """Each step has its number of rows, and an epoch takes every row once; the last one is under way."""
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    taken = [row for step in sorted(steps) for row in steps[step]]
    sizes = [len(steps[step]) for step in sorted(steps)]
    assert sizes == [BATCH_ROWS if step % STEPS_AN_EPOCH else NUM_ROWS % BATCH_ROWS for step in range(1, NUM_STEPS + 1)]
    epochs = [taken[first : first + NUM_ROWS] for first in range(0, len(taken), NUM_ROWS)]
    assert all(sorted(epoch) == list(TRAINING_ROWS) for epoch in epochs[:-1]), "rows of an epoch"
    assert len(epochs) == 4 and len(set(epochs[-1])) == len(epochs[-1]) and set(epochs[-1]) < set(TRAINING_ROWS)


def rename(exported: str) -> str:
    return exported.removeprefix("base_model.model.").replace(".lora_A.weight", ".lora_A").replace(".lora_B.weight", ".lora_B")


def first_adapter(run: Path) -> bytes | None:
    path = run / "first_adapter.safetensors"
    return path.read_bytes() if path.exists() else None
