"""Metrics of one's own: which may be named, what their figures are called, what fails in one sentence. ROUGE of rows, and its
mean."""

import os
import random
from pathlib import Path

import datasets
import pytest
from rouge_score.rouge_scorer import RougeScorer

from tests.support.refusals import refusal
from toolkit.errors import UserError
from toolkit.evaluation.metrics import (
    TextMetric,
    check_names,
    compute_figures,
    load_text_metrics,
    on_rows,
    own_figures,
    try_metrics,
)
from toolkit.evaluation.rouge import (
    ROUGE_KEYS,
    ROUGE_SCORE_WORDS,
    UNICODE_WORDS,
    choose_tokenizer,
    mean_scores,
    rouge_scores,
    split_sentences,
    unicode_tokens,
)

SAME = "return {'share': sum(p == r for p, r in zip(predictions, references)) / len(references), 'parts': [1, 2]}"
SCRIPT = """
import datasets
import evaluate


class Own(evaluate.Metric):
    def _info(self):
        texts = {{"predictions": datasets.Value("string"), "references": datasets.Value("string")}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(texts))

    def _compute(self, predictions, references):
        {body}
"""


def write_metric(folder: Path, body: str) -> Path:
    """Write `<folder>/<its name>.py`, a script for `evaluate` whose metric has this body; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(SCRIPT.format(body=body))
    return folder


def test_numbers_of_a_script_are_figures_named_by_its_folder(tmp_path):
    (metric,) = load_text_metrics([str(write_metric(tmp_path / "same", SAME))])
    assert compute_figures([metric], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 2 / 3}
    assert try_metrics([metric], ["a"] * 99) == ["same/share"]
    (again,) = load_text_metrics([str(tmp_path / "same" / "same.py")])
    write_metric(tmp_path / "same", SAME.replace("==", "!="))
    (changed,) = load_text_metrics([str(tmp_path / "same")])
    assert again.code_hash == metric.code_hash != changed.code_hash
    assert compute_figures([changed], ["a", "b", "c"], ["a", "x", "c"]) == {"same/share": 1 / 3}


def test_numbers_of_a_function_are_figures_under_its_name():
    metrics = [own("plain", lambda *_: 3), own("several", lambda *_: {"a": 1, "b": "x"})]
    assert compute_figures(metrics, ["p"], ["r"]) == {"plain": 3.0, "several/a": 1.0}
    line = {"loss": 1.0, "plain": 3.0, "several/a": None, "several/a_is": "nan"}  # as metrics.jsonl has a figure that is NaN
    assert own_figures(metrics, line) == ["plain", "several/a"]


def test_a_metric_on_rows_gets_the_rows_of_the_predictions_with_all_columns():
    @on_rows
    def of_topic(predictions: list[str], rows: list) -> dict[str, bool]:
        return {row["topic"]: prediction == row["answer"] for prediction, row in zip(predictions, rows, strict=True)}

    given = datasets.Dataset.from_list([{"topic": f"t{place}", "answer": f"a{place}"} for place in range(20)])
    metric = TextMetric("right", "", of_topic, given)
    assert compute_figures([metric], ["a2", "a9"], ["r", "r"], [2, 0]) == {"right/t2": 1.0, "right/t0": 0.0}
    assert len(try_metrics([metric], ["r"] * 20, range(20))) == 8
    with pytest.raises(UserError, match=r"^metrics\['right'\] takes rows: give finetune a datasets.Dataset as train, or "):
        compute_figures([TextMetric("right", "", of_topic)], ["a"], ["r"], [0])


def own(name: str, function, code_hash: str = "") -> TextMetric:
    return TextMetric(name, code_hash, function)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (r"raise KeyError('no\nsuch key')", r"failed on 1 predictions and .* \(KeyError: 'no\\nsuch key'\): fix it"),
        ("return {'parts': [1, 2]}", "returned {'parts': .*}: a metric returns a number, or a dict with numbers$"),
        ("return (", r"cannot be loaded \(SyntaxError: .*\): name one of .*my_metric.py"),
        (None, r"cannot be loaded \(FileNotFoundError: "),
    ],
)
def test_a_script_that_fails_or_does_not_load_is_named_in_one_sentence(tmp_path, body, sentence):
    if body is not None:
        write_metric(tmp_path / "broken", body)
    with pytest.raises(UserError, match=f"^eval.metrics .*broken {sentence}"):
        try_metrics(load_text_metrics([str(tmp_path / "broken")]), ["a"])


def test_a_folder_with_the_name_of_a_hub_metric_does_not_run(tmp_path, monkeypatch):
    write_metric(tmp_path / "sacrebleu", f"open({str(tmp_path / 'ran')!r}, 'w'); return {{'score': 1}}")
    monkeypatch.chdir(tmp_path)
    sentence = "eval.metrics sacrebleu is a name on the hub, but also a path here: write ./sacrebleu for"
    assert refusal(load_text_metrics, ["sacrebleu"]).startswith(sentence)
    assert not os.path.exists("ran")
    assert try_metrics(load_text_metrics(["./sacrebleu"]), ["a"]) == ["sacrebleu/score"] and os.path.exists("ran")


def test_figures_of_the_toolkit_are_not_overwritten():
    for names, sentence in ((["a", "b", "a"], "has two metrics named a: rename"), (["loss"], "has a metric named 'loss', which")):
        assert refusal(check_names, names).startswith(f"eval.metrics {sentence}")
    sentence = "eval.metrics rougeL is the name of a figure of the toolkit: rename the metric"
    assert refusal(compute_figures, [own("rougeL", lambda *_: 1)], ["a"], ["a"]) == sentence
    assert compute_figures([own("exact_match", lambda *_: {"exact_match": 1})], ["a"], ["a"]) == {"exact_match/exact_match": 1}


PREDICTIONS = ["Opened the files quickly. Then closes them.", "a cat", "", "return the running total", "café!"]
REFERENCES = ["It opens a file. Closing follows.", "the cat sat on the mat", "nothing to say", "Return the total.", "!?"]


def by_key(*arguments) -> dict[str, list[float]]:
    rows = rouge_scores(*arguments)
    return {key: [row[key] for row in rows] for key in ROUGE_KEYS}


def draw_text(drawn: random.Random) -> str:
    """Lines of a few words, as a summary; some empty, half in ASCII, the rest with breaks that ROUGE-Lsum does not know."""
    words = ["opens", "opening", "file", "files", "the", "the", "a", "it.", "It", "closes!", "3", "to_string", "e.g."]
    spaces = [" ", " ", " ", " ", "\n", "\n\n", "\r\n", "\x0c"]
    if drawn.random() < 0.5:
        words, spaces = [*words, "café", "naïve?", "—"], [*spaces, "\u2028", "\x85"]
    return "".join(drawn.choice(words) + drawn.choice(spaces) for _ in range(drawn.randrange(30)))


def test_every_row_equals_rouge_score_on_the_same_newlines():
    """What `evaluate.load("rouge").compute(use_stemmer=True, use_aggregator=False)` calls, by its arguments."""
    drawn = random.Random(0)
    predictions, references = ([*given, *(draw_text(drawn) for _ in range(200))] for given in (PREDICTIONS, REFERENCES))
    scorer = RougeScorer(rouge_types=["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True, tokenizer=None)
    rows = by_key(predictions, references, ROUGE_SCORE_WORDS)
    for i, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        expected = scorer.score(reference, prediction)
        assert {key: rows[key][i] for key in ROUGE_KEYS} == {key: 100 * expected[key].fmeasure for key in ROUGE_KEYS}
    assert rows["rouge1"][0] > 0 and rows["rouge1"][3] > 0  # the stemmer joins opened / opens
    assert rows["rougeL"] != rows["rougeLsum"]
    with pytest.raises(ValueError, match="shorter"):
        rouge_scores(predictions, references[1:])
    ascii_only = [i for i, texts in enumerate(zip(predictions, references, strict=True)) if "".join(texts).isascii()]
    some_predictions, some_references = ([texts[i] for i in ascii_only] for texts in (predictions, references))
    of_unicode = by_key(some_predictions, some_references, UNICODE_WORDS)
    assert len(ascii_only) > 10 and of_unicode == {key: [rows[key][i] for i in ascii_only] for key in ROUGE_KEYS}


ENGLISH = "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience."


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Köln, l'été: Straße_3", ["köln", "l", "été", "straße", "3"]),
        ("Ko\u0308ln am", ["köln", "am"]),  # the same letter, typed in two
        ("opened files", ["open", "file"]),
        ("मनुष्यों को ❤️", ["मनुष्यों", "को"]),  # marks stay with their letters, and alone are not words
        ("ＧＰＴ－４模型", ["gpt", "4", "模", "型"]),
        ("コンピュータのー", list("コンピュータのー")),
        ("ที่นี่ 2 ปี", ["ที่", "นี่", "2", "ปี"]),
        ("모든 인간은", ["모든", "인간은"]),
        ("Все люди", ["все", "люди"]),
        ("يولد جميع الناس", ["يولد", "جميع", "الناس"]),
    ],
)
def test_words_of_any_script(text, tokens):
    assert unicode_tokens(text) == tokens
    rows = by_key([text, ENGLISH], [text] * 2, UNICODE_WORDS)
    assert all(rows[key] == pytest.approx([100, 0]) for key in ROUGE_KEYS)


@pytest.mark.parametrize(
    ("references", "words"),
    [
        ([], ROUGE_SCORE_WORDS),
        (["!?", ""], ROUGE_SCORE_WORDS),
        (["a café"] + [ENGLISH] * 6, ROUGE_SCORE_WORDS),  # 1 word of 116
        (["a café"] + [ENGLISH] * 5, UNICODE_WORDS),  # 1 word of 97
        (["Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione."], UNICODE_WORDS),
    ],
)
def test_all_references_together_decide(references, words):
    assert choose_tokenizer(references) is words


def test_mean_is_the_same_to_the_bit_in_any_order():
    values = [random.Random(0).random() * 100 for _ in range(1000)]
    shuffled = random.Random(1).sample(values, len(values))
    first, second = (mean_scores([dict.fromkeys(ROUGE_KEYS, value) for value in rows]) for rows in (values, shuffled))
    assert first == second


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n ", []),
        ("One line, no stop", ["One line, no stop"]),
        ("Wrapped\nline. Next one!", ["Wrapped line.", "Next one!"]),
        ("Heading\n\nText of it", ["Heading", "Text of it"]),
        ('See e.g. Knuth (v1.2). "Really?" Yes.', ["See e.g. Knuth (v1.2).", '"Really?"', "Yes."]),
        ("他来了。「真的吗？」他走了！ 再见", ["他来了。", "「真的吗？」", "他走了！", "再见"]),
        ("वह आया। वह गया।", ["वह आया।", "वह गया।"]),
        ("By J. Doe et al. in 1999. So do I. Fine.", ["By J. Doe et al. in 1999.", "So do I.", "Fine."]),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences
