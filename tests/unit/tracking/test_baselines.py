"""Baselines, of texts and of counted tokens, are measured at the end of a run: the figures that a model has to beat."""

import errno
import math
import os
import random
import statistics

import pytest

from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import load_json_lines
from toolkit.loss import IGNORED_LABEL
from toolkit.objectives.causal import Causal
from toolkit.tracking import baselines
from toolkit.tracking.baselines import _text_baselines, _token_baselines, best_constant, lead_sentence, measure_baselines
from toolkit.tracking.metrics_log import MetricsLog

VERBS, NOUNS = ["Return", "Opens", "Raise", "Closing"], ["the file", "a list of files", "the", "error errors", "value, if any"]


def test_baselines_are_measured_once_and_are_lines_of_the_metrics(tmp_path, monkeypatch):
    from datasets import Dataset

    texts = {"target": ["Return the oar.", "Close the file."], "lead_text": ["Return the oar. And more.", "Nothing alike."]}
    rows, on = Dataset.from_dict(texts), {"rows": "a"}
    data = EvaluationRows(rows, tokenizer=None, collator=None, objective=Causal())
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("eval", 3, loss=1.0, measured_on=on)
    assert measure_baselines(log, 3, rows, data, on) == {}  # no texts
    log.write("eval", 4, rougeL=1.0, measured_on=on)
    first = measure_baselines(log, 4, rows, data, on)
    assert list(first) == ["lead sentence", 'constant "Return the oar."'] and first["lead sentence"]["rougeL"] == 50.0
    lines = [line for line in load_json_lines(log.path, skip_torn_end=True) if line["kind"] == "baseline"]
    assert [(line["name"], line["step"], line["measured_on"]) for line in lines] == [(name, 4, on) for name in first]
    monkeypatch.setattr(baselines, "_text_baselines", lambda *_: pytest.fail("measured again"))
    again = measure_baselines(log, 4, rows, data, on)
    assert {name: line["rougeL"] for name, line in again.items()} == {name: line["rougeL"] for name, line in first.items()}
    # On other rows, and a line that cannot be written, as on a full disk.
    monkeypatch.undo()
    log.write("eval", 5, rougeL=1.0, measured_on=(other := {"rows": "b"}))
    with log.noting_failure(log.path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match="metrics.jsonl cannot be written .No space left on device.: fix that"):
        measure_baselines(log, 5, rows, data, other)


def test_a_set_has_baselines_of_its_own_rows_and_a_long_constant_is_named_by_its_start():
    from datasets import Dataset

    leads = ["Return the oar. And more.", "Nothing alike.", "Close it."]
    targets = ["Return the oar.", "Close the file.", "Close it."]
    rows = Dataset.from_dict({"row_id": range(3), "target": targets, "lead_text": leads})
    inputs = ((2, "news"), (1, "mail"))
    data = EvaluationRows(rows, tokenizer=None, collator=None, objective=Causal(), inputs=inputs)
    lead = _text_baselines(rows, data)["lead sentence"]
    assert [lead[f"{of_set}rougeL"] for of_set in ("", "news/", "mail/")] == [pytest.approx(200 / 3), 50.0, 100.0]
    rows = Dataset.from_dict({"target": ["word " * 20], "lead_text": ["a"]})
    data = EvaluationRows(rows, tokenizer=None, collator=None, objective=Causal())
    assert list(_text_baselines(rows, data))[1] == f'constant "{"word " * 7}…"'


def token_rows(*rows: tuple[list[int], int, int]):
    """Rows of a causal model: their tokens, the number of the prompt's or of the first token, and the bytes of the rest."""
    from datasets import Dataset

    columns = {"input_ids": [ids for ids, _, _ in rows], "target_bytes": [num_bytes for *_, num_bytes in rows]}
    columns["labels"] = [[IGNORED_LABEL] * start + ids[start:] for ids, start, _ in rows]
    return Dataset.from_dict(columns | {"num_tokens": list(map(len, columns["input_ids"])), "row_id": list(range(len(rows)))})


TRAINED_ON = token_rows(([0, 1, 2], 1, 9), ([0, 1, 1], 1, 9))
"""Labels 1, 2, 1, 1: in a vocabulary of 4, p is 4/8 for 1, 2/8 for 2, 1/8 for the others. After 0 comes 1 twice; after 1 come 2
and 1 once each."""
HELD_OUT = token_rows(([0, 1, 3, 2], 1, 4), ([2, 3, 0, 1], 3, 2))
"""The last three tokens of the first, the last of the second."""


def test_counted_tokens_are_a_unigram_and_a_bigram_interpolated_with_it():
    data = EvaluationRows(HELD_OUT, tokenizer=range(4), collator=None, objective=Causal(), inputs=((1, "a"), (1, "b")))
    found = _token_baselines(TRAINED_ON, data)
    after_0, after_1, after_3 = (2 + 1 / 2) / 3, (0 + 2 / 8) / 4, 1 / 4  # 3 was never before a label
    likelihoods = {
        "unigram": [[1 / 2, 1 / 8, 1 / 4], [1 / 2]],
        "interpolated bigram": [[after_0, after_1, after_3], [after_0]],
    }
    assert list(found) == list(likelihoods)
    for name, (of_a, of_b) in likelihoods.items():
        for of_set, values, num_bytes in (("", of_a + of_b, 6), ("a/", of_a, 4), ("b/", of_b, 2)):
            nats = -sum(map(math.log, values))
            assert found[name][f"{of_set}loss"] == pytest.approx(nats / len(values))
            assert found[name][f"{of_set}bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes)


def test_more_tokens_than_are_counted_are_thinned_evenly(monkeypatch):
    data = EvaluationRows(HELD_OUT, tokenizer=range(4), collator=None, objective=Causal())
    of_first = _token_baselines(TRAINED_ON.select([0]), data)
    monkeypatch.setattr(baselines, "MAX_COUNTED_TOKENS", 5)
    assert _token_baselines(TRAINED_ON, data) == of_first


def test_tokens_are_counted_where_it_is_asked_for_and_evaluated(tmp_path):
    log, on = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True), {"rows": "a"}
    causal = EvaluationRows(HELD_OUT, tokenizer=range(4), collator=CausalCollator(0), objective=Causal())
    assert measure_baselines(log, 3, TRAINED_ON, causal, on, counts_tokens=True) == {}  # no evaluation
    log.write("eval", 3, loss=1.0, measured_on=on)
    assert measure_baselines(log, 3, TRAINED_ON, causal, on) == {}
    assert list(measure_baselines(log, 3, TRAINED_ON, causal, on, counts_tokens=True)) == ["unigram", "interpolated bigram"]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_constant_is_nearly_the_winner_by_rouge_1(seed):
    targets, references = (
        [" ".join(draw.choices(VERBS + NOUNS, k=draw.randint(1, 5))) for _ in range(num_rows)]
        for num_rows, draw in ((60, random.Random(seed)), (15, random.Random(seed + 100)))
    )
    means = [mean_scores(rouge_scores([target] * len(references), references))["rouge1"] for target in targets]
    winner = means[targets.index(best_constant(targets, references))]
    assert winner >= 0.9 * max(means) and winner > 1.3 * statistics.fmean(means)


def test_the_best_constant_counts_words_as_rouge_of_the_references_does():
    """rouge_score has one word for these texts, "cd", and the first would win."""
    targets, references = ["关闭窗口 cd", "打开一个文件"], ["打开文件", "打开一些文件", "读文件 cd"]
    means = [mean_scores(rouge_scores([target] * len(references), references))["rougeL"] for target in targets]
    assert best_constant(targets, references) == "打开一个文件" and max(means) == means[1] > 50


@pytest.mark.parametrize(
    ("targets", "references", "best"),
    [
        (["x y", "Close file", "file close", "close files"], ["close"], "Close file"),  # the first of equals
        (["x", "y"], ["z"], "x"),
        (["a", "b", "c", "d", "e", "f", "f"], ["d"], "a"),  # thinned to a, c, e: all three score 0
        (["a", "b", "c", "d", "e", "f", "f"], ["e"], "e"),
    ],
)
def test_the_first_of_equals_wins_and_large_sets_are_thinned_evenly(monkeypatch, targets, references, best):
    monkeypatch.setattr(baselines, "MAX_CANDIDATES", 4 if len(targets) == 4 else 3)
    assert best_constant(targets, references) == best
    assert lead_sentence("Opens the\nfile (e.g. A). Then reads it.\n\nMore.") == "Opens the file (e.g. A)."
    assert (lead_sentence("No stop here"), lead_sentence("  \n")) == ("No stop here", "")
