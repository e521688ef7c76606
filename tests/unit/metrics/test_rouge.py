"""ROUGE rows, their mean and the `evaluate.Metric` around them."""

from __future__ import annotations

import math
import random
import socket

import evaluate
import pytest
from rouge_score.rouge_scorer import RougeScorer

from toolkit.metrics.rouge import ROUGE_KEYS, Rouge, mean_scores, rouge_scores
from toolkit.metrics.text import split_sentences, stemmed_tokens

PREDICTIONS = ["Opened the files quickly. Then closes them.", "a cat", "", "return the running total", "café!"]
REFERENCES = ["It opens a file. Closing follows.", "the cat sat on the mat", "nothing to say", "Return the total.", "!?"]


def test_hand_computed_values():
    rows = rouge_scores(["the cat sat", "down sat the cat", ""], ["the cat sat down", "the cat sat down", "the cat"])
    # Row 1: 3 of 3 predicted and 3 of 4 true words, 2 of 2 and 2 of 3 pairs, a common subsequence of 3.
    # Row 2: the same bag; one common pair ("the cat"); the longest common subsequence is "the cat" or "sat …": 2 words.
    assert rows["rouge1"] == pytest.approx([100 * 6 / 7, 100.0, 0.0])
    assert rows["rouge2"] == pytest.approx([100 * 4 / 5, 100 / 3, 0.0])
    assert rows["rougeL"] == pytest.approx([100 * 6 / 7, 50.0, 0.0])


def test_lsum_matches_sentences_wherever_they_stand():
    rows = rouge_scores(["Close it. Open the door."], ["Open the door. Close it."])
    assert rows["rougeLsum"] == pytest.approx([100.0])
    assert rows["rougeL"] == pytest.approx([60.0])


def test_equals_rouge_score_directly():
    scorer = RougeScorer(list(ROUGE_KEYS), use_stemmer=True)
    rows = rouge_scores(PREDICTIONS, REFERENCES)
    for i, (prediction, reference) in enumerate(zip(PREDICTIONS, REFERENCES, strict=True)):
        lines = scorer.score("\n".join(split_sentences(reference)), "\n".join(split_sentences(prediction)))
        assert {key: rows[key][i] for key in ROUGE_KEYS} == {key: 100 * lines[key].fmeasure for key in ROUGE_KEYS}
    assert rows["rouge1"][0] > 0 and rows["rouge1"][3] > 0  # the stemmer joins opened / opens


def test_cached_stems_are_the_stems_of_the_package():
    default = RougeScorer(["rouge1"], use_stemmer=True)._tokenizer
    text = "Running runners ran; generalisations of 3 flies, agreed (dies) to_string NaN-aware naïveté"
    assert stemmed_tokens(text) == default.tokenize(text)


def test_mean_is_the_same_to_the_bit_in_any_order():
    values = [random.Random(0).random() * 100 for _ in range(1000)]
    shuffled = random.Random(1).sample(values, len(values))
    assert mean_scores({"rouge1": values}) == mean_scores({"rouge1": shuffled})


def test_metric_is_the_mean_of_the_rows_in_one_call_and_in_batches():
    expected = {key: math.fsum(row) / len(PREDICTIONS) for key, row in rouge_scores(PREDICTIONS, REFERENCES).items()}
    metric = Rouge()
    assert metric.compute(predictions=PREDICTIONS, references=REFERENCES) == expected
    metric.add_batch(predictions=PREDICTIONS[:2], references=REFERENCES[:2])
    metric.add_batch(predictions=PREDICTIONS[2:], references=REFERENCES[2:])
    assert metric.compute() == expected
    assert all(0 < value < 100 for value in expected.values())


def test_two_metrics_at_once_do_not_share_rows():
    first, second = Rouge(), Rouge()
    first.add_batch(predictions=["a b"], references=["a b"])
    second.add_batch(predictions=["a b"], references=["c d"])
    assert (first.compute()["rouge1"], second.compute()["rouge1"]) == (100.0, 0.0)
    assert first.data_dir != second.data_dir


def test_works_without_network_or_a_writable_cache(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("network used")

    a_file = tmp_path / "a file where the cache folder would be"
    a_file.touch()
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(a_file))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert Rouge().compute(predictions=["a b"], references=["a c"])["rouge1"] == 50.0


def test_no_rows_and_unequal_lengths_are_refused():
    assert rouge_scores([], []) == {key: [] for key in ROUGE_KEYS}
    with pytest.raises(ValueError, match="no rows"):
        Rouge().compute(predictions=[], references=[])
    with pytest.raises(ValueError, match="2 predictions for 1 references"):
        rouge_scores(["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n ", []),
        ("One line, no stop", ["One line, no stop"]),
        ("Wrapped\nline. Next one!", ["Wrapped line.", "Next one!"]),
        ("Heading\n\nText of it", ["Heading", "Text of it"]),
        ('See e.g. Knuth (v1.2). "Really?" Yes.', ["See e.g. Knuth (v1.2).", '"Really?"', "Yes."]),
        ("By J. Doe et al. in 1999. So do I. Fine.", ["By J. Doe et al. in 1999.", "So do I.", "Fine."]),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences
