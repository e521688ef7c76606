"""What is done after a step, and what a run says of its start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.support.checkpoint_files import LOSS
from toolkit.checkpoint.state import TrainState
from toolkit.config.schema import CheckpointConfig, EvalConfig, TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.training import after_step as module
from toolkit.training.after_step import Session, after_step, is_due, say_without_gain


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
    say_without_gain(TrainState(9, **state), LOSS)
    sentence = f"no evaluated step is better than the start: loss 2 before the first step, at best {at_best} after it\n"
    assert capsys.readouterr().out == (sentence if at_best else "")


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_checkpoint_gets_the_figures_of_an_evaluation_that_a_signal_ended(
    is_resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them it could not be the best: `export.weights best` took a worse one of those that stood."""
    saved: list[dict[str, float]] = []
    monkeypatch.setattr(module, "evaluate", lambda *_: {"loss": 0.4})
    monkeypatch.setattr(module, "log_to_trackers", lambda *_: None)
    monkeypatch.setattr(module, "_save", lambda session, wait: saved.append(session.state.metrics))
    stand_ins = {name: MagicMock() for name in ("bar", "log", "guard", "stops", "writer")}
    stand_ins["stops"].agree.return_value = SimpleNamespace(signal_name=None, write_failed=False)
    stand_ins["writer"].goal = LOSS
    config: Any = SimpleNamespace(eval=EvalConfig(), checkpoint=CheckpointConfig(every_steps=None, keep_best=0))
    run: Any = MagicMock(num_steps=9)
    run.evaluation.rows = [1]
    state = TrainState(4, evaluation_due=True)
    assert not after_step(Session(config, run, state, **stand_ins), is_resumed=is_resumed)
    assert state.metrics == {"loss": 0.4}
    assert saved == ([state.metrics] if is_resumed else [])


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
