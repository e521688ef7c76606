"""ROUGE as an `evaluate.Metric` that needs no network.

`evaluate.load("rouge")` downloads a script from the hub. This class is the same metric over the same `rouge_score` package. Its
figures equal those of `compute(use_stemmer=True, use_aggregator=False)`, and ROUGE-Lsum takes each line of a text as a sentence;
they differ only if the references need words of another script, see `text.choose_tokenizer`.
Rows are scored one by one and averaged exactly (`math.fsum`), so that the result depends neither on the order of the rows nor on
the number of processes; there is no bootstrap. Importing `evaluate` takes seconds: import this module inside the function that
needs it.

Reference: Lin, "ROUGE: a package for automatic evaluation of summaries" (2004); Lsum is its summary-level LCS.
"""

from __future__ import annotations

import math
import tempfile
import uuid
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from toolkit.evaluation.text import Tokenizer, choose_tokenizer

ROUGE_KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

_DESCRIPTION = "Mean F-measure of ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum with Porter stemming, in percent."
_INPUTS = """
Args:
    predictions: generated summaries, a string a row.
    references: true summaries, a string a row.
Returns:
    rouge1, rouge2, rougeL, rougeLsum: percent, 0 to 100.
"""
_CITATION = "Lin, Chin-Yew. ROUGE: a Package for Automatic Evaluation of Summaries. 2004."


class Rouge(evaluate.Metric):
    """`Rouge().compute(predictions=[…], references=[…])` → percent by key of `ROUGE_KEYS`.

    Instances in several processes or threads do not interfere: without a `cache_dir`, each keeps its rows in a temporary folder
    of its own, which is removed with the instance.
    """

    def __init__(self, *, cache_dir: str | None = None, experiment_id: str | None = None, **options: Any):
        if cache_dir is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="rouge-", ignore_cleanup_errors=True)
            cache_dir = self._own_folder.name
        super().__init__(cache_dir=cache_dir, experiment_id=experiment_id or uuid.uuid4().hex, **options)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation=_CITATION, inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return mean_scores(rouge_scores(predictions, references))


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: Tokenizer | None = None
) -> dict[str, list[float]]:
    """F-measure in percent of every row, by key of `ROUGE_KEYS`; 0 if the prediction or the reference has no word.

    Args:
        tokenizer: None chooses it by these references. Pass it if they are only a part of all references.

    Raises:
        ValueError: the two have different lengths.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    scorer = RougeScorer(list(ROUGE_KEYS), tokenizer=tokenizer or choose_tokenizer(references))
    rows: dict[str, list[float]] = {key: [] for key in ROUGE_KEYS}
    for prediction, reference in zip(predictions, references, strict=True):
        row = scorer.score(reference, prediction)
        for key in ROUGE_KEYS:
            rows[key].append(100.0 * row[key].fmeasure)
    return rows


def mean_scores(rows: dict[str, list[float]]) -> dict[str, float]:
    """Mean over the rows, by key. The sum is exact, so any order of the rows gives the same bits.

    Raises:
        ValueError: there are no rows.
    """
    if not all(rows.values()):
        raise ValueError("ROUGE of no rows: give at least one prediction and its reference")
    return {key: math.fsum(values) / len(values) for key, values in rows.items()}
