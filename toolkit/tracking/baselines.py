"""Figures that need no model, measured at the end of a run: of texts, and of tokens for a causal model from scratch.

A model that does not beat them has learned little.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.distributed.comm import rank
from toolkit.evaluation.generate import BASELINE
from toolkit.evaluation.loop import figures_of
from toolkit.evaluation.rouge import choose_tokenizer, mean_scores, rouge_scores, split_sentences
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.loss import IGNORED_LABEL
from toolkit.tracking.metrics_log import MetricsLog

if TYPE_CHECKING:
    from datasets import Dataset

MAX_CANDIDATES = 20_000
MAX_COUNTED_TOKENS = 20_000_000
SHOWN_CHARACTERS = 36
"""Of a baseline's text, in its name."""


def measure_baselines(
    metrics: MetricsLog,
    step: int,
    train_rows: Dataset,
    evaluation: EvaluationRows,
    measured_on: dict[str, Any],
    counts_tokens: bool = False,
) -> dict[str, dict[str, Any]]:
    """Figures that need no model, by name: as an earlier end of the run has written them to `metrics`, else measured and written
    there. Empty on other ranks than 0, and without evaluations of texts or `counts_tokens`: of a model from scratch whose labels
    are the tokens of its rows. If `metrics` cannot be written, that is a `UserError`."""
    lines = [line for line in metrics.load() if line.get("measured_on") == measured_on] if rank() == 0 else []
    evaluations = [line for line in lines if line["kind"] == "eval"]
    if not (named := {line["name"]: line for line in lines if line["kind"] == BASELINE}):
        if evaluations and counts_tokens:
            named |= _token_baselines(train_rows, evaluation)
        if any("rougeL" in line for line in evaluations):
            named |= _text_baselines(train_rows, evaluation)
        for name, figures in named.items():
            metrics.write(BASELINE, step, name=name, **figures, measured_on=measured_on)
        if metrics.error is not None:
            raise metrics.error
    return named


def _text_baselines(train_rows: Dataset, evaluation: EvaluationRows) -> dict[str, dict[str, float]]:
    """ROUGE of the lead sentence and of the best constant summary, over all rows and over each set."""
    constant = best_constant(train_rows["target"][:], evaluation.references)

    def score(data: EvaluationRows, text: str | None) -> dict[str, float]:
        if not data.prompted:
            return {}
        leads = data.rows.select(data.prompted)["lead_text"][:]
        texts = [next(iter(split_sentences(lead)), "") if text is None else text for lead in leads]
        figures = mean_scores(rouge_scores(texts, data.references))
        return figures | {"percent_distinct": 100 * len(set(texts)) / len(texts)}

    shown = constant if len(constant) <= SHOWN_CHARACTERS else f"{constant[: SHOWN_CHARACTERS - 1]}…"
    texts = {"lead sentence": None, f"constant {json.dumps(shown, ensure_ascii=False)}": constant}
    return {label: _of_each_set(evaluation, partial(score, text=text)) for label, text in texts.items()}


def _token_baselines(train_rows: Dataset, evaluation: EvaluationRows) -> dict[str, dict[str, float]]:
    """Loss and bits per byte of two models that count label tokens of the training rows, over all rows and over each set.

    Unigram, of N labels and a vocabulary of V: p(w) = (count(w) + 1) / (N + V).
    Bigram, interpolated with it as by Witten and Bell: p(w|v) = (count(v, w) + kinds(v) p(w)) / (count(v) + kinds(v)), where v
    is the token before w in its row, count(v) the number of labels after v, and kinds(v) how many of them differ; p(w) if there
    are none. Nothing is chosen, neither a weight nor rows to choose it on. Of more than about `MAX_COUNTED_TOKENS`, rows at even
    distances are counted.
    """
    num_rows = len(train_rows) * MAX_COUNTED_TOKENS // int(train_rows.with_format("numpy")["num_tokens"][:].sum())
    before, labels = _read_pairs(train_rows.select(even_places(len(train_rows), max(1, num_rows))))
    size = len(evaluation.tokenizer)
    pairs, num_of_pair = np.unique(before * size + labels, return_counts=True)
    num_after, num_kinds = np.bincount(before, minlength=size), np.bincount(pairs // size, minlength=size)
    unigram = (np.bincount(labels, minlength=size) + 1) / (len(labels) + size)

    def score(data: EvaluationRows, is_bigram: bool) -> dict[str, float]:
        before, labels = _read_pairs(data.rows)
        likelihoods = unigram[labels]
        if is_bigram:
            wanted, kinds = before * size + labels, num_kinds[before].clip(min=1)
            places = pairs.searchsorted(wanted).clip(max=len(pairs) - 1)
            seen = np.where(pairs[places] == wanted, num_of_pair[places], 0)
            likelihoods = (seen + kinds * likelihoods) / (num_after[before] + kinds)
        return figures_of(-float(np.log(likelihoods).sum()), len(labels), sum(data.rows["target_bytes"][:]))

    names = {"unigram": False, "interpolated bigram": True}
    return {name: _of_each_set(evaluation, partial(score, is_bigram=is_bigram)) for name, is_bigram in names.items()}


def _read_pairs(rows: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The token before each label, and the label, int64. A row's first token has no label, so no pair is of two rows."""
    columns = rows.with_format("numpy")
    tokens, labels = (np.concatenate(columns[name][:]).astype(np.int64) for name in ("input_ids", "labels"))
    places = np.flatnonzero(labels != IGNORED_LABEL)
    return tokens[places - 1], labels[places]


def _of_each_set(data: EvaluationRows, score: Callable[[EvaluationRows], dict[str, float]]) -> dict[str, float]:
    """The figures of all rows, and of each set under its name."""
    return score(data) | {f"{name}/{key}": value for name, rows in data.sets.items() for key, value in score(rows).items()}


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
