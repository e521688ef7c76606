"""Words, as ROUGE counts them, and sentences, as the lead baseline takes them. No download, no model: regular expressions only.

`rouge_score` knows a-z and 0-9 only: a Chinese text has no word for it and scores 0, and "Köln" is "k" and "ln". So where the
references have more than stray words with other letters, words are taken by Unicode's rules. Text in ASCII has the same words
either way, to the stem.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import regex

LARGEST_SHARE_DAMAGED = 0.01
"""Share of the references' words that may have letters outside a-z, which `rouge_score` drops or cuts. English borrows fewer
(café, naïve); a language with such letters of its own has more: Italian, which has few, one word in thirty."""

# UAX #14: classes of characters that lines may break between without a space, as in Chinese, Japanese, Thai, Lao, Khmer, Burmese.
_NOT_SPACED = r"[\p{LB=ID}\p{LB=CJ}\p{LB=NS}\p{LB=SA}]"
# `re`'s \w has no combining marks, which most words of Indic scripts hold.
_WORD = regex.compile(
    rf"(?V1)[[\p{{L}}\p{{N}}]&&{_NOT_SPACED}]\p{{M}}*|[[\p{{L}}\p{{N}}]--{_NOT_SPACED}][[\p{{L}}\p{{N}}\p{{M}}]--{_NOT_SPACED}]*"
)

_SENTENCE_GAP = re.compile(
    r"""(?<=[.!?।॥؟۔])(?P<closers>["')\]”’]*)\s+(?=["'(\[“‘`*]*(?P<first>\w))"""
    r"""|(?<=[。！？｡])(?P<wide_closers>[」』”’）]*)\s*(?=[「『“‘（]*\w)"""
)
_LAST_WORD = re.compile(r"\S+$")
_ABBREVIATIONS = {"e.g.", "i.e.", "vs.", "cf.", "mr.", "mrs.", "ms.", "dr.", "prof.", "fig.", "eq.", "approx.", "jr.", "sr."}
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split_sentences(text: str) -> list[str]:
    """Sentences of a text, in order, spaces and line wraps normalised to single spaces; empty for a blank text.

    A sentence ends at `.`, `!` or `?` before white space and anything but a lower-case letter, at `。`, `！` or `？`, or at a
    blank line; not after an abbreviation (`e.g.`) or an initial (`J. Doe`).
    """
    sentences = []
    for paragraph in _BLANK_LINE.split(text):
        sentences += _split_paragraph(" ".join(paragraph.split()))
    return sentences


def _split_paragraph(paragraph: str) -> list[str]:
    sentences, start = [], 0
    for gap in _SENTENCE_GAP.finditer(paragraph):
        if gap["first"] and (gap["first"].islower() or _is_abbreviation(paragraph[start : gap.start()])):
            continue
        sentences.append(paragraph[start : gap.end("closers" if gap["first"] else "wide_closers")])
        start = gap.end()
    return sentences + [paragraph[start:]] if paragraph[start:] else sentences


def _is_abbreviation(text_before_gap: str) -> bool:
    last_word = _LAST_WORD.search(text_before_gap)
    if last_word is None:
        return False
    word = last_word[0].lstrip("([\"'“‘")
    return word.lower() in _ABBREVIATIONS or (len(word) == 2 and word[0].isupper() and word[0] != "I" and word[1] == ".")


@dataclass(frozen=True)
class Tokenizer:
    """How ROUGE takes a text apart, in the form that `RougeScorer(tokenizer=…)` takes."""

    name: str
    """As `rouge_tokenizer` in metrics.jsonl."""
    description: str
    """For a reader, after "ROUGE counts"."""
    tokenize: Callable[[str], list[str]]


def choose_tokenizer(references: Iterable[str]) -> Tokenizer:
    """`ROUGE_SCORE_WORDS`, or `UNICODE_WORDS` where more than `LARGEST_SHARE_DAMAGED` of the references' words need it.

    Decided by all references together and by nothing that a model says, so equal on all ranks and in every evaluation.
    """
    num_words = num_damaged = 0
    for text in references:
        words = _split_words(text)
        num_words += len(words)
        num_damaged += 0 if text.isascii() else sum(not word.isascii() for word in words)
    return UNICODE_WORDS if num_damaged > LARGEST_SHARE_DAMAGED * num_words else ROUGE_SCORE_WORDS


def stemmed_tokens(text: str) -> list[str]:
    """Tokens of `rouge_score` with its Porter stemmer: lower-case runs of `a-z0-9`, stemmed beyond 3 letters.

    The same tokens as `DefaultTokenizer(use_stemmer=True)`, several times faster: words repeat, so their stems are kept.
    """
    from rouge_score.tokenize import tokenize

    return tokenize(text, _CachedStemmer)


def unicode_tokens(text: str) -> list[str]:
    """Lower-case runs of letters, marks and digits of any script; single characters where a script sets no spaces.

    NFKC-normalized, so that é is one letter however it is typed. Runs of a-z and 0-9 are stemmed as in `stemmed_tokens`; there
    is no stemmer for the others.
    """
    return [_CachedStemmer.stem(word) if len(word) > 3 and word.isascii() else word for word in _split_words(text)]


ROUGE_SCORE_WORDS = Tokenizer("rouge_score", "words as rouge_score does: a-z and 0-9, stemmed", stemmed_tokens)
UNICODE_WORDS = Tokenizer(
    "unicode",
    "words of any script, as the references need it: rouge_score drops letters outside a-z; where words are not set apart "
    "(Chinese, Japanese, Thai), each character counts",
    unicode_tokens,
)


def _split_words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


class _CachedStemmer:
    """The part of nltk's stemmer that `rouge_score` calls, remembering the stems of the last 100,000 words."""

    @staticmethod
    @lru_cache(maxsize=100_000)
    def stem(word: str) -> str:
        return _porter_stemmer().stem(word)


@lru_cache(maxsize=1)
def _porter_stemmer():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()
