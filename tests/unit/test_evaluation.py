"""Which figure counts as a gain; predictions that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.evaluation import EvaluationRows, Score, _gather_scores, is_better

NAN = float("nan")


@pytest.mark.parametrize(
    ("metric", "new", "old", "is_gain"),
    [
        ("loss", 1.0, None, True),
        ("loss", NAN, None, False),
        ("loss", NAN, 1.0, False),
        ("loss", 0.9, 1.0, True),
        ("loss", 1.0, 1.0, False),
        ("rougeL", 0.9, 1.0, False),
        ("rougeL", 1.1, 1.0, True),
        ("rougeL", NAN, None, False),
    ],
)
def test_a_nan_is_never_the_best(metric: str, new: float, old: float | None, is_gain: bool) -> None:
    assert is_better(metric, new, old) is is_gain


def test_predictions_that_cannot_be_written_are_told_in_one_sentence(tmp_path: Path) -> None:
    rows: Any = [{"row_id": 7, "target": "a b"}]
    data = EvaluationRows(rows=rows, tokenizer=None, pad_token_id=0, decoder_start_token_id=0)  # type: ignore[arg-type]
    scores = [Score(0, "a", (50.0, 0.0, 50.0, 50.0))]
    assert _gather_scores(scores, data, tmp_path / "predictions.jsonl")["rouge1"] == 50.0
    assert (tmp_path / "predictions.jsonl").read_text().count("\n") == 1
    with pytest.raises(UserError, match="predictions .* could not be written: Is a directory$"):
        _gather_scores(scores, data, tmp_path)
