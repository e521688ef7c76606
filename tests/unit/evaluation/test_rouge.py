"""ROUGE rows and their mean."""

import random

import pytest
from rouge_score.rouge_scorer import RougeScorer

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


# The first article of the Universal Declaration of Human Rights.
ENGLISH = "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience."
NEEDS_UNICODE = {
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Italian": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione.",
    "Russian": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
    "Japanese": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
}


@pytest.mark.parametrize("language", NEEDS_UNICODE)
def test_a_text_scores_100_against_itself_and_less_against_a_part_in_every_script(language):
    text = NEEDS_UNICODE[language]
    assert choose_tokenizer([text]) is UNICODE_WORDS
    rows = by_key([text, text[: len(text) // 2], ENGLISH], [text] * 3)
    for key in ROUGE_KEYS:
        whole, half, other = rows[key]
        assert whole == pytest.approx(100) and 30 < half < 80 and other < 15


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Köln, l'été: Straße_3", ["köln", "l", "été", "straße", "3"]),
        ("Ko\u0308ln", ["köln"]),  # the same letter, typed in two
        ("opened files", ["open", "file"]),
        ("मनुष्यों को ❤️", ["मनुष्यों", "को"]),  # marks stay with their letters, and alone are not words
        ("ＧＰＴ－４模型", ["gpt", "4", "模", "型"]),
        ("コンピュータのー", list("コンピュータのー")),
        ("ที่นี่ 2 ปี", ["ที่", "นี่", "2", "ปี"]),
        ("모든 인간은", ["모든", "인간은"]),
        ("Все люди", ["все", "люди"]),
    ],
)
def test_words_of_any_script(text, tokens):
    assert unicode_tokens(text) == tokens


@pytest.mark.parametrize(
    ("references", "words"),
    [
        ([], ROUGE_SCORE_WORDS),
        (["!?", ""], ROUGE_SCORE_WORDS),
        (["a café"] + [ENGLISH] * 6, ROUGE_SCORE_WORDS),  # 1 word of 116
        (["a café"] + [ENGLISH] * 5, UNICODE_WORDS),  # 1 word of 97
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
