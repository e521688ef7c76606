"""Metrics of one's own: which may be named, what their figures are called, what fails in one sentence, what is compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.metric_scripts import write_metric
from toolkit.checkpoint.find import Goal
from toolkit.config.schema import EvalConfig
from toolkit.data.collate import SummarizationCollator
from toolkit.errors import UserError
from toolkit.evaluation.metrics import (
    TextMetric,
    check_names,
    compute_figures,
    load_text_metrics,
    on_rows,
    own_figures,
    try_metrics,
)
from toolkit.evaluation.rows import EvaluationRows
from toolkit.training.goal import build_goal, check_metric, check_metric_on_rows

SAME = "return {'share': sum(p == r for p, r in zip(predictions, references)) / len(references), 'parts': [1, 2]}"


def test_numbers_of_a_script_are_figures_named_by_its_folder(tmp_path: Path) -> None:
    (metric,) = load_text_metrics([str(write_metric(tmp_path / "same", SAME))])
    assert compute_figures([metric], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 2 / 3}
    assert try_metrics([metric], ["a"] * 99) == ["same/share"]
    (again,) = load_text_metrics([str(tmp_path / "same" / "same.py")])
    write_metric(tmp_path / "same", SAME.replace("==", "!="))
    (changed,) = load_text_metrics([str(tmp_path / "same")])
    assert again.code_hash == metric.code_hash != changed.code_hash
    assert compute_figures([changed], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 1 / 3}


def test_numbers_of_a_function_are_figures_under_its_name() -> None:
    metrics = [
        own("plain", lambda predictions, references: 3),
        own("several", lambda predictions, references: {"a": 1, "b": "x"}),
    ]
    assert compute_figures(metrics, ["p"], ["r"]) == {"plain": 3.0, "several/a": 1.0}
    line = {"loss": 1.0, "plain": 3.0, "several/a": None, "several/a_is": "nan"}  # as metrics.jsonl has a figure that is NaN
    assert own_figures(metrics, line) == ["plain", "several/a"]


def test_a_metric_on_rows_gets_the_rows_of_the_predictions_with_all_columns() -> None:
    import datasets

    @on_rows
    def of_topic(predictions: list[str], rows: list[Any]) -> dict[str, bool]:
        return {row["topic"]: prediction == row["answer"] for prediction, row in zip(predictions, rows, strict=True)}

    given = datasets.Dataset.from_list([{"topic": f"t{place}", "answer": f"a{place}"} for place in range(20)])
    metric = TextMetric("right", "", of_topic, given)
    assert compute_figures([metric], ["a2", "a9"], ["r", "r"], [2, 0]) == {"right/t2": 1.0, "right/t0": 0.0}
    assert len(try_metrics([metric], ["r"] * 20, range(20))) == 8
    with pytest.raises(UserError, match=r"^metrics\['right'\] takes rows: give finetune a datasets.Dataset as train, not data"):
        compute_figures([TextMetric("right", "", of_topic)], ["a"], ["r"], [0])


def own(name: str, function: Any, code_hash: str = "") -> TextMetric:
    return TextMetric(name, code_hash, function)


def returning(value: Any) -> Any:
    return lambda predictions, references: value


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "raise KeyError('no\\nsuch key')",
            r"failed on 1 predictions and their references \(KeyError: 'no\\nsuch key'\): fix it",
        ),
        ("return {'parts': [1, 2]}", "returned {'parts': .*}: a metric returns a number, or a dict with numbers$"),
    ],
)
def test_a_script_that_fails_is_named_in_one_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    metrics = load_text_metrics([str(write_metric(tmp_path / "broken", body))])
    with pytest.raises(UserError, match=f"^eval.metrics .*broken {sentence}"):
        try_metrics(metrics, ["a"])


def test_a_script_that_does_not_load_is_named_in_one_sentence(tmp_path: Path) -> None:
    write_metric(tmp_path / "torn", "return (")
    with pytest.raises(
        UserError, match=r"^eval.metrics .*/torn cannot be loaded \(SyntaxError: .*\): name a metric of .*my_metric.py"
    ):
        load_text_metrics([str(tmp_path / "torn")])
    with pytest.raises(UserError, match=r"^eval.metrics .*/none cannot be loaded \(FileNotFoundError: "):
        load_text_metrics([str(tmp_path / "none")])


def test_a_folder_with_the_name_of_a_hub_metric_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metric(tmp_path / "sacrebleu", f"open({str(tmp_path / 'ran')!r}, 'w'); return {{'score': 1}}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="^eval.metrics sacrebleu is a name on the hub, but also a path here: write ./sacrebleu for"
    ):
        load_text_metrics(["sacrebleu"])
    assert not os.path.exists("ran")
    assert try_metrics(load_text_metrics(["./sacrebleu"]), ["a"]) == ["sacrebleu/score"] and os.path.exists("ran")


def test_figures_of_the_toolkit_are_not_overwritten() -> None:
    for names, sentence in (
        (["a", "b", "a"], "has two metrics named a: rename"),
        (["loss"], "has a metric named 'loss', which"),
    ):
        with pytest.raises(UserError, match=f"^eval.metrics {sentence}"):
            check_names(names)
    with pytest.raises(UserError, match="^eval.metrics rougeL is the name of a figure of the toolkit: rename the metric$"):
        compute_figures([own("rougeL", returning(1))], ["a"], ["a"])
    assert compute_figures([own("exact_match", returning({"exact_match": 1}))], ["a"], ["a"]) == {"exact_match/exact_match": 1}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"best_metric": "bleu/score"}, "choose one of loss, .*percent_distinct, same/…$"),
        ({"best_metric": "same/share"}, "also say which value is better, by eval.higher_is_better true or false$"),
        ({"best_metric": "same/mean", "higher_is_better": True}, "choose one of loss, .*percent_distinct, same/share$"),
        (
            {"best_metric": "loss", "higher_is_better": True},
            "eval.higher_is_better is true, but of loss the other value is better",
        ),
    ],
)
def test_the_best_metric_must_exist_and_have_a_direction(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_metric(EvalConfig(**settings), own=["same"])
        check_metric_on_rows(EvalConfig(**settings), rows_with(own("same", returning({"share": 1}))))


def test_the_best_metric_may_be_a_figure_that_the_first_rows_lack() -> None:
    of_topic = own("right", lambda predictions, references: dict.fromkeys(references, 1))
    data = rows_with(of_topic, targets=[f"t{place}" for place in range(20)])
    check_metric_on_rows(EvalConfig(best_metric="right/t19", higher_is_better=True), data)
    with pytest.raises(UserError, match=r"eval.best_metric is right/t20: choose one of .*, right/t19$"):
        check_metric_on_rows(EvalConfig(best_metric="right/t20", higher_is_better=True), data)


def test_figures_are_equals_only_where_their_code_is_the_same() -> None:
    before, after = (rows_with(own("same", returning(1), code)) for code in ("1", "2"))
    of_loss, of_rouge, of_own = (goal(metric, before) for metric in ("loss", "rougeL", "same"))
    now = goal("same", after).measured_on
    assert not of_loss.changes(now) and not of_rouge.changes(now) and of_own.changes(now) == ["metrics/same"]
    assert of_own.higher_is_better and of_own.changes(goal("loss", rows_with()).measured_on) == ["metrics/same"]


def goal(metric: str, data: EvaluationRows) -> Goal:
    return build_goal(EvalConfig(best_metric=metric, higher_is_better=None if metric == "loss" else True), data)


def rows_with(*metrics: TextMetric, targets: Sequence[str] = ("text",)) -> EvaluationRows:
    import datasets

    tokenizer: Any = None
    rows = datasets.Dataset.from_list([{"row_id": 0, "input_ids": [1], "labels": [2], "target": target} for target in targets])
    return EvaluationRows(rows, tokenizer, SummarizationCollator(0, 0), metrics=metrics)
