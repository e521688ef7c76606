"""Lead sentence and best constant: the figures a model has to beat."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from toolkit.evaluation import baselines
from toolkit.evaluation.baselines import best_constant, lead_sentence, mean_rouge_l
from toolkit.evaluation.rouge import rouge_scores
from toolkit.evaluation.text import stemmed_tokens

VERBS, NOUNS = ["Return", "Opens", "Raise", "Closing"], ["the file", "a list of files", "the", "error errors", "value, if any"]


def random_headlines(num_rows: int, seed: int, most_words: int = 12) -> list[str]:
    draw = random.Random(seed)
    words = [f"word{min(int(draw.expovariate(0.02)), 3000)}" for _ in range(num_rows * most_words)]
    return [" ".join(draw.sample(words, draw.randint(1, most_words))) for _ in range(num_rows)]


def small_headlines(num_rows: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(VERBS + NOUNS, k=draw.randint(1, 5))) for _ in range(num_rows)]


def test_lead_sentence():
    assert lead_sentence("Opens the\nfile (e.g. A). Then reads it.\n\nMore.") == "Opens the file (e.g. A)."
    assert lead_sentence("No stop here") == "No stop here"
    assert lead_sentence("  \n") == ""


def test_rouge_l_is_that_of_the_package():
    candidates, references = [*small_headlines(30, seed=1), "", "?!"], [*small_headlines(20, seed=2), ""]
    candidate_tokens, reference_tokens = ([stemmed_tokens(text) for text in texts] for texts in (candidates, references))
    means = [mean_rouge_l(tokens, reference_tokens) for tokens in candidate_tokens]
    for candidate, mean in zip(candidates, means, strict=True):
        rows = rouge_scores([candidate] * len(references), references)
        assert 100 * mean == pytest.approx(statistics.fmean(rows["rougeL"]))
    assert max(means) > 0.2


@pytest.mark.parametrize("seed", range(5))
def test_best_constant_is_the_winner_of_the_exhaustive_search(seed):
    targets, references = small_headlines(60, seed), small_headlines(15, seed + 100)
    means = [statistics.fmean(rouge_scores([target] * len(references), references)["rougeL"]) for target in targets]
    assert means[targets.index(best_constant(targets, references))] == pytest.approx(max(means))


def test_the_best_constant_counts_words_as_rouge_of_the_references_does():
    """rouge_score has one word for these texts, "cd", and the first would win."""
    targets, references = ["关闭窗口 cd", "打开一个文件"], ["打开文件", "打开一些文件", "读文件 cd"]
    means = [statistics.fmean(rouge_scores([target] * len(references), references)["rougeL"]) for target in targets]
    assert best_constant(targets, references) == "打开一个文件" and max(means) == means[1] > 50


def test_the_first_of_equals_wins():
    assert best_constant(["x y", "Close file", "file close", "close files"], ["close"]) == "Close file"
    assert best_constant(["x", "y"], ["z"]) == "x"


@pytest.mark.parametrize("seed", range(5))
def test_the_winner_is_among_the_few_that_are_scored(monkeypatch, seed):
    """Of many headlines with words of a long tail, as real ones have."""
    targets, references = random_headlines(400, seed), random_headlines(40, seed + 100)
    tokens = [stemmed_tokens(text) for text in references]
    monkeypatch.setattr(baselines, "MAX_RANKED", 40)
    best = max(mean_rouge_l(stemmed_tokens(target), tokens) for target in targets)
    assert mean_rouge_l(stemmed_tokens(best_constant(targets, references)), tokens) == best


def test_large_sets_are_thinned_evenly_and_alike_every_time(monkeypatch):
    monkeypatch.setattr(baselines, "MAX_CANDIDATES", 3)
    targets = ["a", "b", "c", "d", "e", "f", "f"]
    assert best_constant(targets, ["d"]) == "a"  # "d" is not among a, c, e: all three score 0
    assert best_constant(targets, ["e"]) == "e"


def test_fast_on_real_sizes():
    targets, references = random_headlines(6000, seed=5), random_headlines(300, seed=6)
    start_s = time.process_time()
    assert best_constant(targets, references) in targets
    assert time.process_time() - start_s < 3  # 0.6 s of CPU time on two cores


def test_nothing_to_choose_from_is_refused():
    with pytest.raises(ValueError, match="0 and 1 given"):
        best_constant([], ["a"])
    with pytest.raises(ValueError, match="1 and 0 given"):
        best_constant(["a"], [])
