"""What a run says of its start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint_files import LOSS
from toolkit.after_step import say_without_gain
from toolkit.tracking import Progress
from toolkit.train_state import TrainState


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
    say_without_gain(Progress(9, 0, enabled=True), TrainState(9, **state), LOSS)
    sentence = f"no evaluated step gained on the start: loss 2 before the first step, {at_best} at best after it\n"
    assert capsys.readouterr().out == (sentence if at_best else "")
