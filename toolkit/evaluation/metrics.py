"""Metrics of generated texts beside ROUGE: modules of `evaluate`, or functions of predictions and references.

Rank 0 loads them and computes each once over all rows, in row order, so figures do not depend on the number of processes.
A metric runs code. It runs only because the user named it: in `eval.metrics`, or as an argument of `toolkit.finetune`.
"""

import hashlib
import inspect
import numbers
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.distributed.comm import broadcast_object, on_all_ranks, on_rank_0, rank
from toolkit.errors import UserError
from toolkit.private import private

NUM_ROWS_TRIED = 8
"""Number of references on which each metric runs before the model loads."""
OUR_FIGURES = (
    *("loss", "perplexity", "bits_per_byte", "token_accuracy", "num_rows", "rows_per_s", "kind", "step", "measured_on"),
    *("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "percent_distinct", "rouge_tokenizer"),
    *("num_texts", "num_at_max_new_tokens", "num_empty", "num_repeating"),
)
"""Names in the lines of evaluations that no other metric may take."""

TextFunction = Callable[[list[str], list[Any]], Any]
"""(predictions, references), two lists of texts, or with `on_rows` (predictions, rows) → a number, or a dict of numbers."""


def on_rows(function: TextFunction) -> TextFunction:
    """Decorator: the metric gets rows of the `datasets.Dataset` given to the run in the place of references, as dicts."""
    setattr(function, "takes_rows", True)  # noqa: B010  # no field that mypy knows
    return function


@dataclass(frozen=True)
class TextMetric:
    """A metric of generated texts; its figures are `<name>/<key>` for each number of a dict, or `<name>` for a plain number."""

    name: str
    code_hash: str
    """Hash of the code. Figures of different code are not compared."""
    compute: TextFunction | None
    """None on ranks other than 0, which do not call it."""
    given: Any = None
    """The dataset that Python code has given; a `row_id` is a place in it."""


def load_text_metrics(
    modules: Sequence[str], functions: Mapping[str, TextFunction] | None = None, given: Any = None
) -> tuple[TextMetric, ...]:
    """Load each module of `evaluate` that `eval.metrics` names: on the hub, or a folder or file with its script. One that
    cannot be loaded, a name that may mean two things, or that two metrics have, is a `UserError` on every rank. Collective.

    `functions` are the user's, by the names of their figures; they join the modules. `given`: as in `TextMetric`.
    """
    functions = functions or {}
    check_names([*map(metric_name, modules), *functions])
    loaded = on_all_ranks(lambda: [_load_module(name) for name in modules] if rank() == 0 else [])
    loaded += [TextMetric(name, describe_code(function), function, given) for name, function in functions.items() if rank() == 0]
    described = broadcast_object([(metric.name, metric.code_hash) for metric in loaded])
    return tuple(loaded) or tuple(TextMetric(name, code_hash, None) for name, code_hash in described)


def describe_code(function: Callable[..., Any]) -> str:
    """A function's name and the hash of its source, by which a resume notices another one.

    What the function calls or closes over is not seen. Without a source (a builtin, a `partial`), the name is all there is.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        source = inspect.getsource(function if inspect.isroutine(function) or inspect.isclass(function) else type(function))
    except (OSError, TypeError):
        return name
    return f"{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}"


def metric_name(path: str) -> str:
    """What figures of a module call it: the last part of its path or hub id, without `.py`."""
    return Path(path).name.removesuffix(".py")


def check_names(names: Iterable[str]) -> None:
    """Refuse, by a `UserError`, a name that is given twice, or whose figures could be taken for the toolkit's own."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(f"eval.metrics has two metrics named {name}: rename the folder of one, or leave one out")
        if name == "loss" or not name:
            raise UserError(f"eval.metrics has a metric named {name!r}, which the toolkit's own figures are called: rename it")
        seen.add(name)


def compute_figures(
    metrics: Sequence[TextMetric], predictions: Sequence[str], references: Sequence[str], row_ids: Sequence[int] = ()
) -> dict[str, float]:
    """The numbers of all metrics over all rows; what is not a number (lists, texts) is left out. Only for rank 0.

    A module's error is a `UserError`, and so is a metric that returns no number, or a plain one under the name of a figure of the
    toolkit, or takes rows that there are not. A function's errors are its own.
    """
    figures: dict[str, float] = {}
    for metric in metrics:
        assert metric.compute is not None
        takes_rows, name = hasattr(metric.compute, "takes_rows"), metric.name
        if takes_rows and metric.given is None:
            raise UserError(f"metrics[{name!r}] takes rows: give finetune a datasets.Dataset as train, or leave out @on_rows")
        result = metric.compute(list(predictions), metric.given.select(row_ids).to_list() if takes_rows else list(references))
        named = {f"{name}/{key}": value for key, value in result.items()} if isinstance(result, Mapping) else {name: result}
        numbers_only = {name: float(value) for name, value in named.items() if isinstance(value, numbers.Real)}
        if not numbers_only:
            raise UserError(f"eval.metrics {name} returned {result!r:.80}: a metric returns a number, or a dict with numbers")
        figures |= numbers_only
    if taken := figures.keys() & set(OUR_FIGURES):
        raise UserError(f"eval.metrics {min(taken)} is the name of a figure of the toolkit: rename the metric")
    return figures


def own_figures(metrics: Sequence[TextMetric], figures: Mapping[str, Any]) -> list[str]:
    """Names in `figures`, or in a line of `metrics.jsonl`, that belong to these metrics; texts (`NAME_is`) are not figures."""
    names = {metric.name for metric in metrics}
    return [name for name, value in figures.items() if name.split("/")[0] in names and not isinstance(value, str)]


def try_metrics(
    metrics: Sequence[TextMetric], references: Sequence[str], row_ids: Sequence[int] = (), needed: str = ""
) -> list[str]:
    """Compute every metric on a few references as their own predictions; returns the names of the figures. Collective.

    What would fail after hours of training, at the first evaluation, fails here. If the few references lack the figure `needed`,
    all are tried: the keys of a dict may depend on the rows. Errors are those of `compute_figures`, on every rank.
    """

    def compute(number: int) -> list[str]:
        few = list(references[:number])
        return list(compute_figures(metrics, few, few, row_ids[:number])) if few else []

    figures = on_rank_0(lambda: compute(NUM_ROWS_TRIED))
    is_owned = needed.split("/")[0] in {metric.name for metric in metrics}
    return on_rank_0(lambda: compute(len(references))) if is_owned and needed not in figures else figures


def _load_module(name: str) -> TextMetric:
    """Load a module with `evaluate`. A name without a slash is the hub's: no folder's code runs by the accident of its name."""
    if "/" not in name and (Path(name, f"{name}.py").is_file() or Path(name).is_file()):
        raise UserError(f"eval.metrics {name} is a name on the hub, but also a path here: write ./{name} for the path")
    import evaluate

    try:
        # In memory, because files of several runs would share a folder.
        module = evaluate.load(name, keep_in_memory=True, experiment_id=uuid.uuid4().hex)
    except Exception as error:  # importing the script runs its code: anything may come
        remedy = "name one of huggingface.co/evaluate-metric or, without network, a folder as ./my_metric with my_metric.py in it"
        raise UserError(f"eval.metrics {name} cannot be loaded ({_line(error)}): {remedy}") from error

    def compute(predictions: list[str], references: list[Any]) -> Any:
        try:
            return module.compute(predictions=predictions, references=references)
        except Exception as error:  # the code is not ours: anything may come
            what = f"failed on {len(predictions)} predictions and their references ({_line(error)})"
            raise UserError(f"eval.metrics {name} {what}: fix it, or leave it out") from error

    return TextMetric(metric_name(name), str(private("_hash", module)), compute)


def _line(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
