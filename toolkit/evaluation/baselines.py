"""Baseline summaries without a model. A trained model that does not beat them has learned little.

`lead_sentence` repeats the beginning of the source; `best_constant` ignores the source and is the same for every row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from toolkit.evaluation.rows import even_places
from toolkit.evaluation.text import choose_tokenizer, split_sentences

MAX_CANDIDATES = 20_000
MAX_REFERENCES = 500
MAX_RANKED = 200


def lead_sentence(text: str) -> str:
    """The first sentence of a text, on one line; empty for a blank text."""
    sentences = split_sentences(text)
    return sentences[0] if sentences else ""


def best_constant(train_targets: Sequence[str], references: Sequence[str]) -> str:
    """The training target with the highest mean ROUGE-L as the summary of every row.

    Words are counted as in the ROUGE of these references.

    Targets are ranked by how often their words stand in the references, and the mean ROUGE-L of the first `MAX_RANKED` is
    computed. The result is deterministic; the first of equals in the data wins. Of more than `MAX_CANDIDATES` distinct targets
    or `MAX_REFERENCES` references, as many are taken at even distances, so that it takes a few seconds at most on any data set.

    Raises:
        ValueError: there is no target or no reference.
    """
    if not train_targets or not references:
        raise ValueError(f"the best constant needs a target and a reference: {len(train_targets)} and {len(references)} given")
    distinct = list(dict.fromkeys(train_targets))
    candidates = [distinct[place] for place in even_places(len(distinct), MAX_CANDIDATES)]
    tokenize = choose_tokenizer(references).tokenize
    tokens = [tokenize(text) for text in candidates]
    reference_tokens = [tokenize(references[place]) for place in even_places(len(references), MAX_REFERENCES)]
    # Nearly the mean ROUGE-1: the words that a target shares with the references, relative to its length and theirs.
    num_references = Counter(word for reference in reference_tokens for word in set(reference))
    mean_length = statistics.fmean(map(len, reference_tokens))
    likeness = [sum(num_references[word] for word in set(words)) / (len(words) + mean_length + 1) for words in tokens]
    ranked = sorted(range(len(candidates)), key=lambda i: -likeness[i])[:MAX_RANKED]
    return candidates[max(sorted(ranked), key=lambda i: mean_rouge_l(tokens[i], reference_tokens))]


def mean_rouge_l(candidate: list[str], references: Sequence[list[str]]) -> float:
    """Mean ROUGE-L F-measure (0 to 1) of one tokenized candidate as the constant summary of all references.

    The longest common subsequence is computed bit-parallel, with a few integer operations per row of the usual table: Hyyrö,
    "Bit-parallel LCS length computation revisited" (2004).
    """
    positions_of: dict[str, int] = {}
    for position, token in enumerate(candidate):
        positions_of[token] = positions_of.get(token, 0) | 1 << position
    all_positions = (1 << len(candidate)) - 1
    scores = []
    for reference in references:
        row = all_positions
        for token in reference:
            matches = row & positions_of.get(token, 0)
            row = ((row + matches) | (row - matches)) & all_positions
        common = len(candidate) - row.bit_count()
        scores.append(2.0 * common / max(len(candidate) + len(reference), 1))
    return statistics.fmean(scores)
