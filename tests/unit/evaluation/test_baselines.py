"""Lead sentence and best constant: the figures a model has to beat."""

from __future__ import annotations

import random
import statistics

import pytest

from toolkit.evaluation import baselines
from toolkit.evaluation.baselines import best_constant, lead_sentence
from toolkit.evaluation.rouge import mean_scores, rouge_scores

VERBS, NOUNS = ["Return", "Opens", "Raise", "Closing"], ["the file", "a list of files", "the", "error errors", "value, if any"]


def small_headlines(num_rows: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(VERBS + NOUNS, k=draw.randint(1, 5))) for _ in range(num_rows)]


def test_lead_sentence():
    assert lead_sentence("Opens the\nfile (e.g. A). Then reads it.\n\nMore.") == "Opens the file (e.g. A)."
    assert lead_sentence("No stop here") == "No stop here"
    assert lead_sentence("  \n") == ""


@pytest.mark.parametrize("seed", range(5))
def test_the_best_constant_is_nearly_the_winner_by_rouge_1(seed):
    targets, references = small_headlines(60, seed), small_headlines(15, seed + 100)
    means = [mean_scores(rouge_scores([target] * len(references), references))["rouge1"] for target in targets]
    winner = means[targets.index(best_constant(targets, references))]
    assert winner >= 0.9 * max(means) and winner > 1.3 * statistics.fmean(means)


def test_the_best_constant_counts_words_as_rouge_of_the_references_does():
    """rouge_score has one word for these texts, "cd", and the first would win."""
    targets, references = ["关闭窗口 cd", "打开一个文件"], ["打开文件", "打开一些文件", "读文件 cd"]
    means = [mean_scores(rouge_scores([target] * len(references), references))["rougeL"] for target in targets]
    assert best_constant(targets, references) == "打开一个文件" and max(means) == means[1] > 50


def test_the_first_of_equals_wins():
    assert best_constant(["x y", "Close file", "file close", "close files"], ["close"]) == "Close file"
    assert best_constant(["x", "y"], ["z"]) == "x"


def test_large_sets_are_thinned_evenly_and_alike_every_time(monkeypatch):
    monkeypatch.setattr(baselines, "MAX_CANDIDATES", 3)
    targets = ["a", "b", "c", "d", "e", "f", "f"]
    assert best_constant(targets, ["d"]) == "a"  # "d" is not among a, c, e: all three score 0
    assert best_constant(targets, ["e"]) == "e"
