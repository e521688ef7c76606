"""What is done after a step, and what a run says of its start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.checkpoint_files import LOSS
from toolkit.checkpoint.state import TrainState
from toolkit.config.schema import CheckpointConfig, EvalConfig, TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.training.after_step import is_due, say_without_gain
from toolkit.training.run import Run


@pytest.mark.parametrize(
    ("state", "at_best"),
    [
        ({"start_value": 2.0, "best_value": 2.5}, "2.5"),
        ({"start_value": 2.0, "best_value": 2.0}, "2"),
        ({"start_value": 2.0, "num_evaluations_without_gain": 3}, "nan"),  # every figure was a NaN
        ({"start_value": 2.0, "best_value": 1.9}, None),
        ({"start_value": 2.0}, None),
        ({"best_value": 2.5}, None),
    ],
)
def test_it_is_said_where_no_step_gained_on_the_start(
    state: dict[str, Any], at_best: str | None, capsys: pytest.CaptureFixture
) -> None:
    say_without_gain(cast(Run, SimpleNamespace(state=TrainState(9, **state), goal=LOSS)))
    sentence = f"no evaluated step is better than the start: loss 2 before the first step, at best {at_best} after it\n"
    assert capsys.readouterr().out == (sentence if at_best else "")


@pytest.mark.parametrize(
    ("section", "due"),
    [
        ({}, []),
        ({"every_steps": 3}, [3, 6, 9]),
        ({"every_epochs": 0.5}, [3, 5, 8, 10]),
        ({"every_epochs": 2.0}, [10]),
    ],
)
def test_what_repeats_is_due_by_steps_or_by_epochs(section: dict[str, Any], due: list[int]) -> None:
    ones = np.ones(10, dtype=np.int64)
    plan = BatchPlan(ones, ones, TrainConfig(global_batch_size_rows=2), world_size=1)
    for config in (EvalConfig(**section), CheckpointConfig(**section)):
        assert [step for step in range(1, 11) if is_due(step, config, plan)] == due
