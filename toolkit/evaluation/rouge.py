"""ROUGE without network, and without the bootstrap of `evaluate.load("rouge")`, which downloads a script from the hub; and how
texts are split into words for it, and into sentences for the lead baseline.

The figures equal those of its `compute(use_stemmer=True, use_aggregator=False)`, over the same `rouge_score` package, and
ROUGE-Lsum takes each line of a text as a sentence. But `rouge_score` knows only a-z and 0-9: a Chinese text has no words and
scores 0, and "Köln" becomes "k" and "ln". If more than a few words of the references have other letters, words are therefore
split by Unicode's rules; ASCII text has the same stemmed words either way. Rows are scored one by one and averaged exactly
(`math.fsum`), so that the result depends neither on the order of the rows nor on the number of processes.

Reference: Lin, "ROUGE: a package for automatic evaluation of summaries" (2004); Lsum is its summary-level LCS.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

LARGEST_SHARE_DAMAGED = 0.01
"""Largest share of the references' words with letters outside a-z, which `rouge_score` drops or cuts. English has fewer (café,
naïve); languages with such letters have more: even Italian, which has few of them, has one word in thirty."""

# UAX #14 classes of characters between which lines may break without a space: Chinese, Japanese, Thai, Lao, Khmer, Burmese.
_NOT_SPACED = r"[\p{LB=ID}\p{LB=CJ}\p{LB=NS}\p{LB=SA}]"
# The \w of `re` excludes combining marks, which most words of Indic scripts contain.
_WORD = regex.compile(
    rf"(?V1)[[\p{{L}}\p{{N}}]&&{_NOT_SPACED}]\p{{M}}*|[[\p{{L}}\p{{N}}]--{_NOT_SPACED}][[\p{{L}}\p{{N}}\p{{M}}]--{_NOT_SPACED}]*"
)
PIECE = regex.compile(rf"{_WORD.pattern}|[^\p{{L}}\p{{N}}\p{{M}}\s]+")
"""A word, or the characters between two."""

_SENTENCE_GAP = re.compile(
    r"""(?<=[.!?।॥؟۔])(?P<closers>["')\]”’]*)\s+(?=["'(\[“‘`*]*(?P<first>\w))"""
    r"""|(?<=[。！？｡])(?P<wide_closers>[」』”’）]*)\s*(?=[「『“‘（]*\w)"""
)
_ABBREVIATIONS = {"e.g.", "i.e.", "vs.", "cf.", "mr.", "mrs.", "ms.", "dr.", "prof.", "fig.", "eq.", "approx.", "jr.", "sr."}
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, with white space normalised to single spaces; empty for a blank text.

    A sentence ends at `.`, `!` or `?` before white space and anything but a lower-case letter, at `。`, `！` or `？`, or at a
    blank line. It does not end after an abbreviation (`e.g.`) or an initial (`J. Doe`).
    """
    sentences = []
    for paragraph in (" ".join(part.split()) for part in _BLANK_LINE.split(text)):
        start = 0
        for gap in _SENTENCE_GAP.finditer(paragraph):
            if gap["first"]:
                word = paragraph[start : gap.start()].split()[-1].lstrip("([\"'“‘")
                is_initial = len(word) == 2 and word[0].isupper() and word[0] != "I" and word[1] == "."
                if gap["first"].islower() or is_initial or word.lower() in _ABBREVIATIONS:
                    continue
            sentences.append(paragraph[start : gap.end("closers" if gap["first"] else "wide_closers")])
            start = gap.end()
        sentences += [paragraph[start:]] if paragraph[start:] else []
    return sentences


@dataclass(frozen=True)
class Tokenizer:
    """How ROUGE splits a text into words; usable as `RougeScorer(tokenizer=…)`."""

    name: str
    """The value of `rouge_tokenizer` in metrics.jsonl."""
    description: str
    """Continues the printed sentence "ROUGE counts …"."""
    tokenize: Callable[[str], list[str]]


def choose_tokenizer(references: Iterable[str]) -> Tokenizer:
    """`UNICODE_WORDS` if more than `LARGEST_SHARE_DAMAGED` of the references' words need it, else `ROUGE_SCORE_WORDS`.

    The choice depends only on the references, never on predictions, so it is equal on all ranks and in every evaluation.
    """
    num_words = num_damaged = 0
    for text in references:
        words = _split_words(text)
        num_words += len(words)
        num_damaged += 0 if text.isascii() else sum(not word.isascii() for word in words)
    return UNICODE_WORDS if num_damaged > LARGEST_SHARE_DAMAGED * num_words else ROUGE_SCORE_WORDS


def stemmed_tokens(text: str) -> list[str]:
    """Tokens of `rouge_score` with its Porter stemmer: lower-case runs of `a-z0-9`, stemmed beyond 3 letters.

    These are the tokens of `DefaultTokenizer(use_stemmer=True)`, several times faster because stems are cached.
    """
    from rouge_score.tokenize import tokenize

    return tokenize(text, _stemmer())


def unicode_tokens(text: str) -> list[str]:
    """Lower-case runs of letters, marks and digits of any script; single characters in scripts without spaces.

    The text is NFKC-normalized, so that é is one letter however it is encoded. Runs of a-z and 0-9 are stemmed as in
    `stemmed_tokens`; there is no stemmer for the others.
    """
    return [_stemmer().stem(word) if len(word) > 3 and word.isascii() else word for word in _split_words(text)]


ROUGE_SCORE_WORDS = Tokenizer("rouge_score", "words as rouge_score does: a-z and 0-9, stemmed", stemmed_tokens)
UNICODE_WORDS = Tokenizer(
    "unicode",
    "words of any script, as the references need it: rouge_score drops letters outside a-z; in scripts without spaces (Chinese, "
    "Japanese, Thai), each character counts",
    unicode_tokens,
)


def _split_words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    """nltk's stemmer, with a cache of 100,000 stems."""
    from nltk.stem.porter import PorterStemmer

    stemmer = PorterStemmer()
    stemmer.stem = lru_cache(maxsize=100_000)(stemmer.stem)
    return stemmer


ROUGE_KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: Tokenizer | None = None
) -> list[dict[str, float]]:
    """F-measures of every row in percent, by key of `ROUGE_KEYS`; 0 if the prediction or the reference has no word. Without a
    `tokenizer`, these references choose it: pass it if they are only a part of all references."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_KEYS), tokenizer=tokenizer or choose_tokenizer(references))
    rows = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return [{key: 100.0 * row[key].fmeasure for key in ROUGE_KEYS} for row in rows]


def mean_scores(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over at least one row, by key. The sum is exact, so any order of the rows gives the same bits."""
    return {key: math.fsum(row[key] for row in rows) / len(rows) for key in ROUGE_KEYS}
