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

from toolkit.evaluation.words import Tokenizer, choose_tokenizer

ROUGE_KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: Tokenizer | None = None
) -> list[dict[str, float]]:
    """F-measures of every row in percent, by key of `ROUGE_KEYS`; 0 if the prediction or the reference has no word.

    Args:
        tokenizer: None chooses it by these references. Pass it if they are only a part of all references.

    Raises:
        ValueError: the two have different lengths.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_KEYS), tokenizer=tokenizer or choose_tokenizer(references))
    rows = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return [{key: 100.0 * row[key].fmeasure for key in ROUGE_KEYS} for row in rows]


def mean_scores(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over at least one row, by key. The sum is exact, so any order of the rows gives the same bits."""
    return {key: math.fsum(row[key] for row in rows) / len(rows) for key in ROUGE_KEYS}
