"""Baseline summaries without a model. A trained model that does not beat them has learned little.

`lead_sentence` repeats the beginning of the source; `best_constant` ignores the source and is the same for every row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np

from toolkit.evaluation.text import choose_tokenizer, split_sentences

MAX_CANDIDATES = 20_000
MAX_REFERENCES = 500
MAX_RANKED = 400
_CHUNK_ROWS = 1024


def lead_sentence(text: str) -> str:
    """The first sentence of a text, on one line; empty for a blank text."""
    sentences = split_sentences(text)
    return sentences[0] if sentences else ""


def best_constant(train_targets: Sequence[str], references: Sequence[str]) -> str:
    """The training target with the highest mean ROUGE-L as the summary of every row.

    Words are counted as in the ROUGE of these references.

    Exhaustive ROUGE would take minutes. The mean ROUGE-1 of all targets is one matrix product, and it is an upper bound of the
    mean ROUGE-L (a common subsequence is a common bag). Targets are ranked by it, and their ROUGE-L is computed from the top,
    until no later target can win or `MAX_RANKED` are done. The result is deterministic; the first of equals in the data wins.
    Of more than `MAX_CANDIDATES` distinct targets or `MAX_REFERENCES` references, as many are taken at even distances, so
    that it takes a few seconds at most on any data set.

    Raises:
        ValueError: there is no target or no reference.
    """
    if not train_targets or not references:
        raise ValueError(f"the best constant needs a target and a reference: {len(train_targets)} and {len(references)} given")
    # Rank the candidates by the upper bound.
    candidates = _at_even_distances(list(dict.fromkeys(train_targets)), MAX_CANDIDATES)
    tokenize = choose_tokenizer(references).tokenize
    candidate_tokens = [tokenize(text) for text in candidates]
    reference_tokens = [tokenize(text) for text in _at_even_distances(references, MAX_REFERENCES)]
    upper_bounds = mean_rouge1(candidate_tokens, reference_tokens)
    # Compute the exact score from the top, until the bound is below the best.
    best, best_score = 0, -1.0
    for i in np.argsort(-upper_bounds, kind="stable")[:MAX_RANKED].tolist():
        if upper_bounds[i] < best_score:
            break
        score = mean_rouge_l(candidate_tokens[i], reference_tokens)
        if score > best_score or (score == best_score and i < best):
            best, best_score = i, score
    return candidates[best]


def mean_rouge1(candidates: Sequence[list[str]], references: Sequence[list[str]]) -> np.ndarray:
    """Mean ROUGE-1 F-measure (0 to 1) of each tokenized candidate as the constant summary of all references; `[candidates]`.

    If a word's k-th occurrence counts as a word of its own, the clipped overlap of two bags is a dot product. Counts are small
    integers, exact in float32.
    """
    column_of: dict[tuple[str, int], int] = {}
    columns_of_references = [[column_of.setdefault(key, len(column_of)) for key in _occurrences(tokens)] for tokens in references]
    in_reference = np.zeros((len(references), max(len(column_of), 1)), dtype=np.float32)
    for row, columns in enumerate(columns_of_references):
        in_reference[row, columns] = 1.0
    reference_lengths = np.array([len(tokens) for tokens in references])
    means = []
    for start in range(0, len(candidates), _CHUNK_ROWS):
        chunk = candidates[start : start + _CHUNK_ROWS]
        in_candidate = np.zeros((len(chunk), in_reference.shape[1]), dtype=np.float32)
        for row, tokens in enumerate(chunk):
            in_candidate[row, [column_of[key] for key in _occurrences(tokens) if key in column_of]] = 1.0
        overlaps = in_candidate @ in_reference.T
        total_lengths = np.array([len(tokens) for tokens in chunk])[:, None] + reference_lengths
        means.append((2.0 * overlaps / np.maximum(total_lengths, 1)).mean(axis=1))
    return np.concatenate(means)


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


def _occurrences(tokens: list[str]) -> list[tuple[str, int]]:
    """`["a", "b", "a"]` → `[("a", 0), ("a", 1), ("b", 0)]`."""
    return [(token, k) for token, count in Counter(tokens).items() for k in range(count)]


def _at_even_distances(texts: Sequence[str], most: int) -> list[str]:
    """All texts, or `most` of them spread over the whole sequence."""
    if len(texts) <= most:
        return list(texts)
    return [texts[i * len(texts) // most] for i in range(most)]
