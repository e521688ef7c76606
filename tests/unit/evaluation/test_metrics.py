"""Metrics of one's own: which may be named, what their figures are called, what fails in one sentence, what is compared."""

import os
from collections.abc import Sequence

import datasets
import pytest

from tests.support.eval_rows import eval_rows
from tests.support.metric_scripts import write_metric
from tests.support.refusals import refusal
from toolkit.checkpoint.find import BestMetric
from toolkit.config.schema import EvalConfig
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
from toolkit.training.best_metric import build_best_metric, check_metric, check_metric_on_rows

SAME = "return {'share': sum(p == r for p, r in zip(predictions, references)) / len(references), 'parts': [1, 2]}"


def test_numbers_of_a_script_are_figures_named_by_its_folder(tmp_path):
    (metric,) = load_text_metrics([str(write_metric(tmp_path / "same", SAME))])
    assert compute_figures([metric], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 2 / 3}
    assert try_metrics([metric], ["a"] * 99) == ["same/share"]
    (again,) = load_text_metrics([str(tmp_path / "same" / "same.py")])
    write_metric(tmp_path / "same", SAME.replace("==", "!="))
    (changed,) = load_text_metrics([str(tmp_path / "same")])
    assert again.code_hash == metric.code_hash != changed.code_hash
    assert compute_figures([changed], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 1 / 3}


def test_numbers_of_a_function_are_figures_under_its_name():
    metrics = [own("plain", lambda *_: 3), own("several", lambda *_: {"a": 1, "b": "x"})]
    assert compute_figures(metrics, ["p"], ["r"]) == {"plain": 3.0, "several/a": 1.0}
    line = {"loss": 1.0, "plain": 3.0, "several/a": None, "several/a_is": "nan"}  # as metrics.jsonl has a figure that is NaN
    assert own_figures(metrics, line) == ["plain", "several/a"]


def test_a_metric_on_rows_gets_the_rows_of_the_predictions_with_all_columns():
    @on_rows
    def of_topic(predictions: list[str], rows: list) -> dict[str, bool]:
        return {row["topic"]: prediction == row["answer"] for prediction, row in zip(predictions, rows, strict=True)}

    given = datasets.Dataset.from_list([{"topic": f"t{place}", "answer": f"a{place}"} for place in range(20)])
    metric = TextMetric("right", "", of_topic, given)
    assert compute_figures([metric], ["a2", "a9"], ["r", "r"], [2, 0]) == {"right/t2": 1.0, "right/t0": 0.0}
    assert len(try_metrics([metric], ["r"] * 20, range(20))) == 8
    with pytest.raises(UserError, match=r"^metrics\['right'\] takes rows: give finetune a datasets.Dataset as train, not data"):
        compute_figures([TextMetric("right", "", of_topic)], ["a"], ["r"], [0])


def own(name: str, function, code_hash: str = "") -> TextMetric:
    return TextMetric(name, code_hash, function)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (r"raise KeyError('no\nsuch key')", r"failed on 1 predictions and .* \(KeyError: 'no\\nsuch key'\): fix it"),
        ("return {'parts': [1, 2]}", "returned {'parts': .*}: a metric returns a number, or a dict with numbers$"),
        ("return (", r"cannot be loaded \(SyntaxError: .*\): name a metric of .*my_metric.py"),
        (None, r"cannot be loaded \(FileNotFoundError: "),
    ],
)
def test_a_script_that_fails_or_does_not_load_is_named_in_one_sentence(tmp_path, body, sentence):
    if body is not None:
        write_metric(tmp_path / "broken", body)
    with pytest.raises(UserError, match=f"^eval.metrics .*broken {sentence}"):
        try_metrics(load_text_metrics([str(tmp_path / "broken")]), ["a"])


def test_a_folder_with_the_name_of_a_hub_metric_does_not_run(tmp_path, monkeypatch):
    write_metric(tmp_path / "sacrebleu", f"open({str(tmp_path / 'ran')!r}, 'w'); return {{'score': 1}}")
    monkeypatch.chdir(tmp_path)
    sentence = "eval.metrics sacrebleu is a name on the hub, but also a path here: write ./sacrebleu for"
    assert refusal(load_text_metrics, ["sacrebleu"]).startswith(sentence)
    assert not os.path.exists("ran")
    assert try_metrics(load_text_metrics(["./sacrebleu"]), ["a"]) == ["sacrebleu/score"] and os.path.exists("ran")


def test_figures_of_the_toolkit_are_not_overwritten():
    for names, sentence in ((["a", "b", "a"], "has two metrics named a: rename"), (["loss"], "has a metric named 'loss', which")):
        assert refusal(check_names, names).startswith(f"eval.metrics {sentence}")
    sentence = "eval.metrics rougeL is the name of a figure of the toolkit: rename the metric"
    assert refusal(compute_figures, [own("rougeL", lambda *_: 1)], ["a"], ["a"]) == sentence
    assert compute_figures([own("exact_match", lambda *_: {"exact_match": 1})], ["a"], ["a"]) == {"exact_match/exact_match": 1}


@pytest.mark.parametrize(
    ("metric", "is_higher_better", "sentence"),
    [
        ("bleu/score", None, "choose one of loss, .*percent_distinct, right/…$"),
        ("right/t19", None, "also say which value is better, by eval.higher_is_better true or false$"),
        ("right/t20", True, "eval.best_metric is right/t20: choose one of .*, right/t19$"),
        ("loss", True, "eval.higher_is_better is true, but of loss the other value is better"),
    ],
)
def test_the_best_metric_must_exist_and_have_a_direction(metric, is_higher_better, sentence):
    of_topic = own("right", lambda predictions, references: dict.fromkeys(references, 1))
    data = rows_with(of_topic, targets=[f"t{place}" for place in range(20)])
    config = EvalConfig(best_metric=metric, higher_is_better=is_higher_better)
    with pytest.raises(UserError, match=sentence):
        check_metric(config, own=["right"])
        check_metric_on_rows(config, data)
    # One that the first rows lack is found.
    check_metric_on_rows(EvalConfig(best_metric="right/t19", higher_is_better=True), data)


def test_figures_are_equals_only_where_their_code_is_the_same():
    before, after = (rows_with(own("same", lambda *_: 1, code)) for code in ("1", "2"))
    of_loss, of_rouge, of_own = (goal(metric, before) for metric in ("loss", "rougeL", "same"))
    now = goal("same", after).measured_on
    assert not of_loss.changes(now) and not of_rouge.changes(now) and of_own.changes(now) == ["metrics/same"]
    assert of_own.higher_is_better and of_own.changes(goal("loss", rows_with()).measured_on) == ["metrics/same"]


def goal(metric: str, data: EvaluationRows) -> BestMetric:
    return build_best_metric(EvalConfig(best_metric=metric, higher_is_better=None if metric == "loss" else True), data)


def rows_with(*metrics: TextMetric, targets: Sequence[str] = ("text",)) -> EvaluationRows:
    rows = [{"row_id": 0, "input_ids": [1], "labels": [2], "target": target} for target in targets]
    return eval_rows(rows, metrics=metrics)
