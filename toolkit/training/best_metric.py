"""`eval.best_metric`: which metrics exist, and which of two values is better."""

from collections.abc import Collection
from typing import Any

from toolkit.checkpoint.find import BestMetric
from toolkit.config.schema import EvalConfig
from toolkit.distributed.comm import on_all_ranks
from toolkit.errors import UserError
from toolkit.evaluation.metrics import try_metrics
from toolkit.evaluation.rouge import ROUGE_KEYS
from toolkit.evaluation.rows import EvaluationRows, split_metric

TEXT_METRICS = (*ROUGE_KEYS, "exact_match", "percent_distinct")
LOSS_METRICS = ("loss", "perplexity", "bits_per_byte", "token_accuracy")
HIGHER_IS_BETTER = (*TEXT_METRICS, "token_accuracy")
_GENERATION = ("max_new_tokens", "num_beams", "no_repeat_ngram_size")


def build_best_metric(config: EvalConfig, data: EvaluationRows) -> BestMetric:
    """What `eval.best_metric` names, with what it is measured on: metrics of texts depend on generation settings too,
    those of `eval.metrics` on their code, those of a named set on its rows, and the loss on the objective's settings."""
    keys = _GENERATION if config.generate else ()
    code = {f"metrics/{own.name}": own.code_hash for own in data.metrics}
    sets = {"sets": {name: rows.fingerprint for name, rows in data.sets.items()}} if data.sets else {}
    how = {key: getattr(config, key) or int(key == "num_beams") for key in keys}  # unset, as in a base without settings
    loss = {"loss": settings} if (settings := data.objective.loss_settings()) else {}
    return best_metric_of(config, {"rows": data.fingerprint, **loss, **how, **code, **sets})


def best_metric_of(config: EvalConfig, measured_on: dict[str, Any]) -> BestMetric:
    """What `eval.best_metric` names, measured on this."""
    of_set, metric = split_metric(config.best_metric, measured_on.get("sets", ()))
    rows = ("rows", "sets") if of_set else ("rows",)
    if metric in LOSS_METRICS:
        return BestMetric(config.best_metric, metric in HIGHER_IS_BETTER, measured_on, rows)
    keys = [*rows, *_GENERATION]
    is_higher_better: bool | None = metric in HIGHER_IS_BETTER
    if metric not in TEXT_METRICS:
        keys, is_higher_better = [*keys, f"metrics/{metric.split('/')[0]}"], config.higher_is_better
    assert is_higher_better is not None  # ensured by check_metric
    return BestMetric(config.best_metric, is_higher_better, measured_on, tuple(key for key in keys if key in measured_on))


def check_metric(
    config: EvalConfig, own: Collection[str], sets: Collection[str] = (), of_loss: Collection[str] = LOSS_METRICS
) -> None:
    """Check that evaluations may produce the metric, and that which value is better is known; else a `UserError`, with the
    metrics that exist: `own` beside the toolkit's, those of the `sets`, and the objective's `of_loss`."""
    (_, metric), higher = split_metric(config.best_metric, sets), config.higher_is_better
    known = (*of_loss, *(TEXT_METRICS if config.generate else ()))
    if metric in known and metric in (*LOSS_METRICS, *TEXT_METRICS):
        if higher is not None and higher != (metric in HIGHER_IS_BETTER):
            given = str(higher).lower()
            raise UserError(f"eval.higher_is_better is {given}, but of {metric} the other value is better: leave it out")
    elif metric not in known and metric.split("/")[0] not in own:
        choice = [*known, *(f"{name}/…" for name in own), *(f"{name}/loss" for name in sets)]
        remedy = "set eval.generate true, or choose" if metric in TEXT_METRICS else "choose"
        raise UserError(f"eval.best_metric is {config.best_metric}: {remedy} one of {', '.join(choice)}")
    elif higher is None:
        remedy = "also say which value is better, by eval.higher_is_better true or false"
        raise UserError(f"eval.best_metric is {config.best_metric}: {remedy}")


def check_metric_on_rows(config: EvalConfig, data: EvaluationRows) -> None:
    """Check that evaluations of these rows produce the metric, by computing `data.metrics` on a few references. Collective. Rows
    without a prompt to generate a text for, or a metric that fails or lacks that figure, are a `UserError` on every rank."""
    of_set, metric = split_metric(config.best_metric, data.set_names)
    of_loss = data.objective.name_metrics()

    def check(figures: Collection[str]) -> None:
        if of_set and of_set not in data.sets:
            raise UserError(f"eval.best_metric is {config.best_metric}, but the set {of_set} has no rows to evaluate on")
        rows = data.sets[of_set] if of_set else data
        if metric not in of_loss and not rows.prompted:
            trouble = f"eval.best_metric is {config.best_metric}, but no held-out row has a prompt"
            raise UserError(f"{trouble}: choose {of_loss[0]} or the like")
        if metric not in (known := (*of_loss, *TEXT_METRICS, *figures)):
            choice = (f"{of_set}/{figure}" if of_set else figure for figure in known)
            raise UserError(f"eval.best_metric is {config.best_metric}: choose one of {', '.join(choice)}")

    row_ids = data.rows.select(data.prompted)["row_id"][:]
    figures = try_metrics(data.metrics, data.references, row_ids, metric) if data.metrics else []
    on_all_ranks(lambda: check(figures))
