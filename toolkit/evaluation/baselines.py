"""Baseline summaries without a model. A trained model that does not beat them has learned little.

`lead_sentence` repeats the beginning of the source; `best_constant` ignores the source and is the same for every row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from toolkit.evaluation.rows import even_places
from toolkit.evaluation.words import choose_tokenizer, split_sentences

MAX_CANDIDATES = 20_000


def lead_sentence(text: str) -> str:
    """The first sentence of a text, on one line; empty for a blank text."""
    sentences = split_sentences(text)
    return sentences[0] if sentences else ""


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
