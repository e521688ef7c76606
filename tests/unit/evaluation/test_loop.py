"""What figures are measured on; predictions that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint.find import Goal
from toolkit.config.schema import EvalConfig
from toolkit.data.collate import SummarizationCollator
from toolkit.errors import UserError
from toolkit.evaluation.generate import Score, gather_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.training.goal import build_goal

ROWS = [{"row_id": i, "input_ids": [i, 2, 3][: 1 + i], "labels": [4, i], "target": f"text {i}"} for i in range(3)]


def goal_of(rows: list[dict[str, Any]], **settings: Any) -> Goal:
    import datasets

    tokenizer: Any = None
    return build_goal(
        EvalConfig(**settings), EvaluationRows(datasets.Dataset.from_list(rows), tokenizer, SummarizationCollator(0, 0))
    )


def test_figures_are_equals_where_rows_are_the_same_and_texts_are_generated_alike() -> None:
    rouge = {"best_metric": "rougeL"}
    of_loss, of_texts = goal_of(ROWS), goal_of(ROWS, **rouge)
    assert not of_texts.changes(goal_of(ROWS, batch_size_rows=2, unshard="never", num_rows=3, **rouge).measured_on)
    for settings in ({"num_beams": 2}, {"max_new_tokens": 9}, {"no_repeat_ngram_size": 3}):
        other = goal_of(ROWS, **settings)
        assert of_texts.changes(other.measured_on) == list(settings) and not of_loss.changes(other.measured_on)
    assert of_texts.changes(goal_of(ROWS, generate=False).measured_on) == ["max_new_tokens", "num_beams", "no_repeat_ngram_size"]
    changed_rows = [ROWS[:2], ROWS[1:], ROWS[::-1], *([{**ROWS[0], **cell}, *ROWS[1:]] for cell in CHANGED_CELLS)]
    for rows in changed_rows:
        assert of_loss.changes(goal_of(rows).measured_on) == ["rows"]
    moved = [{**row, "row_id": 9} for row in ROWS]
    assert not of_loss.changes(goal_of(moved).measured_on)


CHANGED_CELLS: list[dict[str, Any]] = [{"input_ids": [1]}, {"labels": [4]}, {"labels": [4, 1]}, {"target": "text"}]


def test_predictions_that_cannot_be_written_are_reported_in_one_sentence(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"row_id": 7, "target": "a b"}, {"row_id": 8, "target": "c"}])
    tokenizer: Any = None
    data = EvaluationRows(rows=rows, tokenizer=tokenizer, collator=SummarizationCollator(0, 0))
    scores = [Score(1, " c\n", (100.0, 0.0, 100.0, 100.0)), Score(0, "a", (50.0, 0.0, 50.0, 50.0))]
    figures = gather_scores(scores, data, tmp_path / "predictions.jsonl")
    assert figures["rouge1"] == 75.0 and figures["exact_match"] == 50.0 and figures["percent_distinct"] == 100.0
    assert (tmp_path / "predictions.jsonl").read_text().count("\n") == 2
    scores = [Score(0, "b", (0.0, 0.0, 0.0, 0.0)), Score(1, "b", (0.0, 0.0, 0.0, 0.0))]
    assert gather_scores(scores, data, tmp_path / "predictions.jsonl")["percent_distinct"] == 50.0  # one text of two
    with pytest.raises(UserError, match="predictions .* could not be written: Is a directory$"):
        gather_scores(scores, data, tmp_path)
