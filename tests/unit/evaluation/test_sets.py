"""Figures of sets in tables: under their plain names, and only where the rows are those of the last evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.refusals import refusal
from tests.unit.evaluation.test_loop import ROWS
from toolkit.config.schema import EvalConfig
from toolkit.data.collate import SummarizationCollator
from toolkit.evaluation.rows import EvaluationRows, list_by_set, of_all_rows, split_metric
from toolkit.training.goal import build_goal, check_metric, check_metric_on_rows

SETS = {"news": "1", "mail": "2"}


def test_a_figure_is_of_the_set_before_its_first_slash() -> None:
    metrics = ("loss", "news/loss", "news/bleu/score", "bleu/score", "loss/news")
    split = [split_metric(metric, SETS) for metric in metrics]
    assert split == [("", "loss"), ("news", "loss"), ("news", "bleu/score"), ("", "bleu/score"), ("", "loss/news")]


def test_a_table_has_each_set_below_all_rows_without_figures_of_other_rows() -> None:
    of_now = {"loss": 2.0, "news/loss": 3.0, "mail/loss": 1.0, "measured_on": {"rows": "0", "sets": SETS}}
    renamed = {**of_now, "measured_on": {"rows": "0", "sets": {"news": "1", "mail": "3"}}}
    older = {"loss": 4.0, "measured_on": {"rows": "0"}}
    lines: dict[str, Any] = {"lead": {"rougeL": 5.0, "mail/rougeL": 6.0}, "old": older, "renamed": renamed, "now": of_now}
    listed = list_by_set(lines, SETS)
    for figures in listed.values():
        figures.pop("measured_on", None)
    assert listed == {
        "lead": {"rougeL": 5.0},
        "old": {"loss": 4.0},
        "renamed": {"loss": 2.0},
        "now": {"loss": 2.0},
        "news: renamed": {"loss": 3.0},
        "news: now": {"loss": 3.0},
        "mail: lead": {"rougeL": 6.0},
        "mail: now": {"loss": 1.0},
    }
    assert of_all_rows(older) == of_all_rows(of_now) == {"rows": "0"} and of_all_rows({}) is None


def make_data(*inputs: tuple[int, str], prompt_lengths: tuple[int, ...] = (1, 1, 0)) -> EvaluationRows:
    import datasets

    rows = [{**row, "prompt_length": length} for row, length in zip(ROWS, prompt_lengths, strict=True)]
    tokenizer: Any = None
    return EvaluationRows(datasets.Dataset.from_list(rows), tokenizer, SummarizationCollator(0, 0), inputs=inputs)


def test_a_goal_of_a_set_compares_where_the_sets_have_the_same_rows() -> None:
    data = make_data((2, "news"), (1, "mail"))
    of_loss, of_rouge = (EvalConfig(best_metric=metric) for metric in ("mail/loss", "mail/rougeL"))
    goal = build_goal(of_loss, data)
    assert (goal.metric, goal.higher_is_better, goal.compared) == ("mail/loss", False, ("rows", "sets"))
    assert build_goal(of_rouge, data).higher_is_better and "num_beams" in build_goal(of_rouge, data).compared
    for inputs in (((2, "mail"), (1, "news")), ((1, "news"), (2, "mail"))):
        assert goal.changes(build_goal(of_loss, replace(data, inputs=inputs)).measured_on) == ["sets"]
    of_all = build_goal(EvalConfig(), data)
    assert of_all.changes(build_goal(EvalConfig(), replace(data, inputs=())).measured_on) == []


@pytest.mark.parametrize(
    ("settings", "trouble"),
    [
        ({"best_metric": "post/loss"}, "percent_distinct, bleu/…, news/loss, mail/loss"),
        ({"best_metric": "news/rougeL", "generate": False}, "eval.best_metric is news/rougeL: choose one of loss, "),
        ({"best_metric": "news/bleu/score"}, "eval.best_metric is news/bleu/score: also say which value is better, by eval."),
        ({"best_metric": "news/loss", "higher_is_better": True}, "eval.higher_is_better is true, but of loss the other value"),
    ],
)
def test_a_name_that_no_evaluation_has_is_refused(settings: dict[str, Any], trouble: str) -> None:
    assert trouble in refusal(check_metric, EvalConfig(**settings), ["bleu"], ["news", "mail"])


def test_a_set_without_rows_or_prompts_is_no_goal() -> None:
    data = make_data((2, "news"), (1, "mail"), (0, "post"))
    for metric in ("news/rougeL", "mail/loss", "news/loss"):
        check_metric_on_rows(EvalConfig(best_metric=metric), data)
    trouble = "eval.best_metric is post/loss, but the set post has no rows to evaluate on"
    assert refusal(check_metric_on_rows, EvalConfig(best_metric="post/loss"), data) == trouble
    trouble = "eval.best_metric is mail/rougeL, but no held-out row has a prompt: choose loss or the like"
    assert refusal(check_metric_on_rows, EvalConfig(best_metric="mail/rougeL"), data).startswith(trouble)
