"""Sentences and stemmed words, as ROUGE and the baselines see a text. No download, no model: regular expressions only."""

from __future__ import annotations

import re
from functools import lru_cache

_SENTENCE_GAP = re.compile(r"""(?<=[.!?])(?P<closers>["')\]”’]*)\s+(?=["'(\[“‘`*]*(?P<first>\w))""")
_LAST_WORD = re.compile(r"\S+$")
_ABBREVIATIONS = {"e.g.", "i.e.", "vs.", "cf.", "mr.", "mrs.", "ms.", "dr.", "prof.", "fig.", "eq.", "approx.", "jr.", "sr."}
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split_sentences(text: str) -> list[str]:
    """Sentences of a text, in order, spaces and line wraps normalised to single spaces; empty for a blank text.

    A sentence ends at `.`, `!` or `?` before white space and anything but a lower-case letter, or at a blank line;
    not after an abbreviation (`e.g.`) or an initial (`J. Doe`).
    """
    sentences = []
    for paragraph in _BLANK_LINE.split(text):
        sentences += _split_paragraph(" ".join(paragraph.split()))
    return sentences


def _split_paragraph(paragraph: str) -> list[str]:
    sentences, start = [], 0
    for gap in _SENTENCE_GAP.finditer(paragraph):
        if gap["first"].islower() or _is_abbreviation(paragraph[start : gap.start()]):
            continue
        sentences.append(paragraph[start : gap.end("closers")])
        start = gap.end()
    return sentences + [paragraph[start:]] if paragraph[start:] else sentences


def _is_abbreviation(text_before_gap: str) -> bool:
    last_word = _LAST_WORD.search(text_before_gap)
    if last_word is None:
        return False
    word = last_word[0].lstrip("([\"'“‘")
    return word.lower() in _ABBREVIATIONS or (len(word) == 2 and word[0].isupper() and word[0] != "I" and word[1] == ".")


def stemmed_tokens(text: str) -> list[str]:
    """Tokens of `rouge_score` with its Porter stemmer: lower-case runs of `a-z0-9`, stemmed beyond 3 letters.

    The same tokens as `DefaultTokenizer(use_stemmer=True)`, several times faster: words repeat, so their stems are kept.
    """
    from rouge_score.tokenize import tokenize

    return tokenize(text, _CachedStemmer)


class StemmedTokenizer:
    """`stemmed_tokens` in the form that `RougeScorer(tokenizer=…)` takes."""

    tokenize = staticmethod(stemmed_tokens)


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
