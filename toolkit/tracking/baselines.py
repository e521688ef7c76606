"""Figures of texts that need no model, measured at the end of a run. A model that does not beat them has learned little."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.distributed.comm import rank
from toolkit.evaluation.generate import BASELINE
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.evaluation.words import choose_tokenizer, split_sentences
from toolkit.tracking.metrics_log import MetricsLog

if TYPE_CHECKING:
    from datasets import Dataset

MAX_CANDIDATES = 20_000
SHOWN_CHARACTERS = 36
"""Of a baseline's text, in its name."""


def measure_baselines(
    metrics: MetricsLog, step: int, train_rows: Dataset, evaluation: EvaluationRows, measured_on: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Figures of texts that need no model, by name: as an earlier end of the run has written them to `metrics`, else measured and
    written there. Empty on other ranks than 0, and without evaluations of texts.

    Raises:
        UserError: `metrics` cannot be written.
    """
    lines = [line for line in metrics.load() if line.get("measured_on") == measured_on] if rank() == 0 else []
    if not any("rougeL" in line for line in lines if line["kind"] == "eval"):
        return {}
    if not (named := {line["name"]: line for line in lines if line["kind"] == BASELINE}):
        named = _baselines(train_rows, evaluation)
        for name, figures in named.items():
            metrics.write(BASELINE, step, name=name, **figures, measured_on=measured_on)
        if metrics.error is not None:
            raise metrics.error
    return named


def _baselines(train_rows: Dataset, evaluation: EvaluationRows) -> dict[str, dict[str, float]]:
    """ROUGE of the lead sentence and of the best constant summary, over all rows and over each set."""
    constant = best_constant(train_rows["target"][:], evaluation.references)

    def score(data: EvaluationRows, text: str | None) -> dict[str, float]:
        leads = data.rows.select(data.prompted)["lead_text"][:]
        texts = [lead_sentence(lead) if text is None else text for lead in leads]
        figures = mean_scores(rouge_scores(texts, data.references))
        return figures | {"percent_distinct": 100 * len(set(texts)) / len(texts)}

    found = {}
    shown = constant if len(constant) <= SHOWN_CHARACTERS else f"{constant[: SHOWN_CHARACTERS - 1]}…"
    for label, text in (("lead sentence", None), (f"constant {json.dumps(shown, ensure_ascii=False)}", constant)):
        found[label] = score(evaluation, text)
        for name, rows in evaluation.sets.items():
            if rows.prompted:
                found[label] |= {f"{name}/{key}": value for key, value in score(rows, text).items()}
    return found


def lead_sentence(text: str) -> str:
    """The first sentence of a text, on one line; empty for a blank text."""
    return next(iter(split_sentences(text)), "")


def best_constant(train_targets: Sequence[str], references: Sequence[str]) -> str:
    """The training target that shares most words with the references, relative to its length and theirs: nearly the mean ROUGE-1.

    Words are those of the ROUGE of these references. The first of equals wins. Of more than `MAX_CANDIDATES` distinct targets, as
    many are taken at even distances.
    """
    tokenize = choose_tokenizer(references).tokenize
    reference_words = [tokenize(reference) for reference in references]
    num_references = Counter(word for words in reference_words for word in set(words))
    mean_length = statistics.fmean(map(len, reference_words))

    def likeness(target: str) -> float:
        words = tokenize(target)
        return sum(num_references[word] for word in set(words)) / (len(words) + mean_length + 1)

    distinct = list(dict.fromkeys(train_targets))
    return max((distinct[place] for place in even_places(len(distinct), MAX_CANDIDATES)), key=likeness)
