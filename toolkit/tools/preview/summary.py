"""All rows in figures: lengths, the share of labels, duplicates, special tokens, what was left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.load import RecipeConfig
from toolkit.data.rows.example import read_examples
from toolkit.data.rows.load import TextRows, hash64
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.objectives.objective import Objective
from toolkit.tools.report.facts import LONGEST_TEXT, MOST_PREDICTIONS

if TYPE_CHECKING:
    from datasets import Dataset

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
MOST_BINS = 16
_MOST_DUPLICATES = 3
_ROWS_AT_ONCE = 1000
_MOST_TOKENS_RECORDED = 10**9
"""Counting these takes seconds, before the first step."""


def summarize(
    rows: TokenizedRows, evaluation: EvaluationRows, config: Any, model: str, *, finds_duplicates: bool = True
) -> dict[str, Any]:
    """What a run reads and how long it is, in plain values for JSON; for the process that has read the rows. `evaluation` are the
    rows to evaluate, of `rows.evaluation`. If it `finds_duplicates`, it has examples of them, for which all texts are read."""
    assert rows.texts is not None, "each node's first process has them"
    tokenizer = rows.tokenizer
    roles: dict[str, list[str]] = {}
    for role, token in tokenizer.special_tokens_map.items():
        for text in token if isinstance(token, list) else [token]:
            roles.setdefault(str(text), []).append(role)
    for text in tokenizer.all_special_tokens:
        roles.setdefault(str(text), ["special"])
    ids: dict[str, Any] = {text: tokenizer.convert_tokens_to_ids(text) for text in roles}
    used = _count_tokens(rows.train, max(len(tokenizer), *ids.values()) + 1)
    duplicates = _find_duplicates(rows.texts) if finds_duplicates and rows.texts.repeats else []
    return {
        "model": model,
        "readings": rows.texts.readings,  # how each input is read, from which columns
        "remarks": [remark for remark in rows.remarks if remark not in rows.texts.repeats],  # what was left out, cut or split
        "splits": [{"name": "training", **_count(rows.train)}, {"name": "evaluation", **_count(evaluation.rows)}],
        "sources": _list_sources(rows.train, config),
        "lengths": _measure(evaluation.objective, rows.train, config),
        "duplicates": [*rows.texts.repeats, *duplicates],
        "special_tokens": [  # each with its roles as the tokenizer names them, and how often it stands in the training rows
            {"roles": ", ".join(names), "text": text, "token_id": ids[text], "num_in_training": int(used[ids[text]])}
            for text, names in roles.items()
        ],
        "stop_tokens": [str(tokenizer.convert_ids_to_tokens(i)) for i in rows.stop_token_ids],  # end a causal model's text
        "chat_template": bool(tokenizer.chat_template),
        "tokenizer": f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens",
        "fingerprint": rows.fingerprint,  # of the tokens; a resume compares it
    }


def _count(part: Dataset, chosen: np.ndarray | slice = slice(None)) -> dict[str, int]:
    tokens, labels = part.with_format("numpy")["num_tokens"][:][chosen], _count_labels(part)[chosen]
    return {"num_rows": len(tokens), "num_tokens": int(tokens.sum()), "num_label_tokens": int(labels.sum())}


def _count_labels(part: Dataset) -> np.ndarray:
    """The tokens of each row that count in the loss; a pair counts as one, but its answers have more."""
    return part.with_format("numpy")["num_answer_tokens" if "num_answer_tokens" in part.column_names else "num_label_tokens"][:]


def _list_sources(train: Dataset, config: DataConfig | LLMDataConfig) -> list[dict[str, Any]]:
    """The entries of `data.mix`, each with its share of an epoch's rows; empty without a mix."""
    if not config.mix:
        return []
    indices, whole = train.with_format("numpy")["source_index"][:], sum(entry.weight for entry in config.mix)
    return [
        {
            "name": f"data.mix[{place}] {entry.name or entry.source}".rstrip(),
            "weight_share": entry.weight / whole,
            **_count(train, indices == place),
        }
        for place, entry in enumerate(config.mix)
    ]


def _measure(objective: Objective, train: Dataset, config: DataConfig | LLMDataConfig) -> list[dict[str, Any]]:
    sides = objective.side_lengths(train)
    limits = {side: f"data.{limit} {getattr(config, limit)}" for side, limit in objective.limits.items()}
    spreads = [_spread(side, lengths, limits[side]) for side, lengths in sides.items()]
    return spreads if objective.label_side else [*spreads, _spread("counted", _count_labels(train), None)]


def _spread(name: str, lengths: np.ndarray, setting: str | None) -> dict[str, Any]:
    """The training rows' lengths in one respect: `row`, `source` or `target`, or `counted`, the tokens that count in the loss;
    with the setting that limits it, and its value.

    `percentiles` are lengths that rows have, by percent of the rows; `bins` are (fewest tokens, most tokens, number of rows),
    equally wide, by 1, 2 or 5 times a power of 10.
    """
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    first, last = int(lengths.min()), int(lengths.max())
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    width = next(step for step in steps if last // step - first // step < MOST_BINS)
    edges = np.arange(first // width, last // width + 2) * width
    counts, _ = np.histogram(lengths, edges)
    bins = [[int(low), min(int(low) + width - 1, last), int(count)] for low, count in zip(edges[:-1], counts, strict=True)]
    percentiles = {str(percent): int(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"name": name, "setting": setting, "percentiles": percentiles, "bins": bins}


def _count_tokens(train: Dataset, vocab_size: int) -> np.ndarray:
    """How often each token stands in the rows."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    names = [name for name in ("input_ids", "labels") if name == "input_ids" or "prompt_length" not in train.column_names]
    for name in names:  # a causal model's labels are its tokens again
        for chunk in train.data.column(name).chunks:
            found = np.bincount(chunk.flatten().to_numpy(zero_copy_only=False), minlength=vocab_size)
            counts = counts + found[:vocab_size]
    return counts


def _find_duplicates(texts: TextRows) -> list[str]:
    """The first few rows that repeat another, as one sentence."""
    train_ids, train = _hash_contents(texts.train)
    held_out_ids, held_out = _hash_contents(texts.evaluation)
    contents, firsts, of_row = np.unique(train, return_index=True, return_inverse=True)
    again = np.flatnonzero(firsts[of_row] != np.arange(len(train)))[:_MOST_DUPLICATES]
    pairs = [f"row {train_ids[row]} repeats row {train_ids[firsts[of_row[row]]]}" for row in again]
    for row in np.flatnonzero(np.isin(held_out, train))[:_MOST_DUPLICATES]:
        first = firsts[np.searchsorted(contents, held_out[row])]
        pairs.append(f"row {held_out_ids[row]} (evaluation) is row {train_ids[first]} (training) again")
    return [f"for example: {'; '.join(pairs)}"]


def _hash_contents(part: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The id of each row, and a 64-bit hash of what makes two rows duplicates."""
    hashes = (hash64(example.content) for batch in part.iter(_ROWS_AT_ONCE) for example in read_examples(batch))
    return part.with_format("numpy")["row_id"][:], np.fromiter(hashes, dtype=np.uint64, count=len(part))


def describe_rows(config: RecipeConfig, rows: TokenizedRows, evaluation: EvaluationRows) -> dict[str, Any]:
    """What `preview` says of all rows, but examples of duplicates, and the sources of the rows that texts are generated for."""
    num_tokens = rows.train.with_format("numpy")["num_tokens"][:].sum()
    about: dict[str, Any] = {"data": {}, "sources": {}}
    if 0 < num_tokens <= _MOST_TOKENS_RECORDED:
        about["data"] = summarize(rows, evaluation, config.data, config.model.name_or_path, finds_duplicates=False)
    if config.eval.generate and evaluation.prompted:
        about["sources"] = _sources(evaluation)
    return about


def _sources(evaluation: EvaluationRows) -> dict[str, str]:
    """The source text of each row that a page shows, by its `row_id`."""
    places = [evaluation.prompted[i] for i in even_places(len(evaluation.prompted), MOST_PREDICTIONS)]
    columns = evaluation.rows.select(places).select_columns(["row_id", "lead_text"])
    # A character more than a page shows, so that it is seen to be cut.
    return {str(row["row_id"]): row["lead_text"][: LONGEST_TEXT + 1] for row in columns}
