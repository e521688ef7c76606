"""`eval.best_metric`: which metrics exist, and which of two values is better."""

from __future__ import annotations

from toolkit.checkpoint.find import Goal
from toolkit.config.schema import EvalConfig
from toolkit.errors import UserError
from toolkit.evaluation.generate import ROUGE_METRICS
from toolkit.evaluation.rows import EvaluationRows

TEXT_METRICS = (*ROUGE_METRICS, "exact_match", "percent_distinct")


LOSS_METRICS = ("loss", "perplexity", "bits_per_byte", "token_accuracy")


HIGHER_IS_BETTER = (*TEXT_METRICS, "token_accuracy")


def build_goal(config: EvalConfig, data: EvaluationRows) -> Goal:
    """The goal that `eval.best_metric` names, with what it is measured on: metrics of texts depend on generation settings too."""
    metric = config.best_metric
    keys = ("max_new_tokens", "num_beams", "no_repeat_ngram_size") if config.generate else ()
    measured_on = {"rows": data.fingerprint, **{key: getattr(config, key) for key in keys}}
    return Goal(metric, metric in HIGHER_IS_BETTER, measured_on, tuple(measured_on) if metric in TEXT_METRICS else ("rows",))


def check_metric(config: EvalConfig, data: EvaluationRows | None = None) -> None:
    """Check that evaluations produce the metric; with `data`, also on these rows.

    Raises:
        UserError: it does not exist; the sentence lists those that do.
    """
    known = (*LOSS_METRICS, *(TEXT_METRICS if config.generate else ()))
    if data is not None and config.best_metric in TEXT_METRICS and not data.prompted:
        raise UserError(f"eval.best_metric is {config.best_metric}, but no held-out row has a prompt: choose loss or the like")
    if config.best_metric not in known:
        raise UserError(f"eval.best_metric is {config.best_metric}: choose one of {', '.join(known)}")
