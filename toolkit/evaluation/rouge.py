"""ROUGE without network, and without the bootstrap of `evaluate.load("rouge")`, which downloads a script from the hub.

The figures equal those of its `compute(use_stemmer=True, use_aggregator=False)`, over the same `rouge_score` package, and
ROUGE-Lsum takes each line of a text as a sentence; they differ only if the references need words of another script, see
`text.choose_tokenizer`. Rows are scored one by one and averaged exactly (`math.fsum`), so that the result depends neither on the
order of the rows nor on the number of processes.

Reference: Lin, "ROUGE: a package for automatic evaluation of summaries" (2004); Lsum is its summary-level LCS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.evaluation.text import Tokenizer, choose_tokenizer

ROUGE_KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


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
