"""Which figure counts as a gain; predictions that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.data.collate import SummarizationCollator
from toolkit.errors import UserError
from toolkit.evaluation import Score, _gather_scores, is_better
from toolkit.evaluation_rows import EvaluationRows

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
    import datasets

    rows = datasets.Dataset.from_list([{"row_id": 7, "target": "a b"}, {"row_id": 8, "target": "c"}])
    tokenizer: Any = None
    data = EvaluationRows(rows=rows, tokenizer=tokenizer, collator=SummarizationCollator(0, 0))
    scores = [Score(1, " c\n", (100.0, 0.0, 100.0, 100.0)), Score(0, "a", (50.0, 0.0, 50.0, 50.0))]
    figures = _gather_scores(scores, data, tmp_path / "predictions.jsonl")
    assert figures["rouge1"] == 75.0 and figures["exact_match"] == 50.0 and figures["percent_distinct"] == 100.0
    assert (tmp_path / "predictions.jsonl").read_text().count("\n") == 2
    scores = [Score(0, "b", (0.0, 0.0, 0.0, 0.0)), Score(1, "b", (0.0, 0.0, 0.0, 0.0))]
    assert _gather_scores(scores, data, tmp_path / "predictions.jsonl")["percent_distinct"] == 50.0  # one text of two
    with pytest.raises(UserError, match="predictions .* could not be written: Is a directory$"):
        _gather_scores(scores, data, tmp_path)
