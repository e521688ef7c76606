"""A run of a model class of the user's is that of plain PyTorch with this class, up to its texts and exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.distributed.test_absolute import FIGURE_TOLERANCE, check_weights
from tests.distributed.test_invariants import rows_of_steps
from tests.planting.plant import NO_FAULT
from tests.support.absolute_runs import FP32, KINDS, NUM_EVAL_ROWS, inputs, run_ranks
from tests.support.launch import run_on_ranks
from tests.support.own_models import loaded_by_transformers, own_class
from tests.support.plain_pytorch import NUM_STEPS, Figures, train_plain
from tests.support.small_run import figures, run_in_this_process
from toolkit.files.json_lines import load_json_lines


@pytest.mark.parametrize(("kind", "preset"), [("t5", "fsdp2_cpu"), ("llama", "fsdp2_cpu")])
def test_a_class_that_changes_the_logits_of_its_parent_trains_as_in_plain_pytorch(tmp_path: Path, kind: str, preset: str) -> None:
    recipe, family, _ = KINDS[kind]
    flags = ["--optim.label_smoothing=0", f"--eval.unshard={'auto' if kind == 't5' else 'never'}"]
    run_ranks(kind, preset, tmp_path, FP32, flags, train_own_class)
    run = tmp_path / f"{kind}-{preset}"
    steps = rows_of_steps(run)
    evaluation, train = (load_json_lines(inputs() / f"{recipe}-{name}.jsonl") for name in ("eval", "train"))
    rows = [[train[row - NUM_EVAL_ROWS] for row in steps[step]] for step in sorted(steps)]
    args = (recipe, inputs() / family, rows, evaluation)
    expected = run_on_ranks(follow, preset="single", overrides=FP32, args=args, env=NO_FAULT)[0]

    lines = load_json_lines(run / "metrics.jsonl")
    np.testing.assert_allclose(figures(lines, "train")["loss"], expected.losses, rtol=FIGURE_TOLERANCE)
    np.testing.assert_allclose(figures(lines, "train")["grad_norm"], expected.grad_norms, rtol=FIGURE_TOLERANCE)
    np.testing.assert_allclose(figures(lines, "eval")["loss"], expected.eval_losses, rtol=FIGURE_TOLERANCE)
    check_weights(run / "export", expected.weights)
    for step, texts in zip((0, NUM_STEPS), expected.texts, strict=True):
        predictions = {line["row_id"]: line["prediction"] for line in load_json_lines(run / f"predictions-{step}.jsonl")}
        assert predictions == dict(enumerate(texts))


def train_own_class(recipe: str, argv: list[str], folder: Path) -> None:
    """On every rank: the recipe as it stands, whose `finetune` is given the class."""
    from toolkit.training import finetune

    train = finetune.finetune
    with patch.object(finetune, "finetune", lambda config: train(config, model=own_class(recipe))):
        run_in_this_process(recipe, argv)


def follow(recipe: str, *args: Any) -> Figures:
    with loaded_by_transformers(recipe):
        return train_plain(*args, None, 0.0)
