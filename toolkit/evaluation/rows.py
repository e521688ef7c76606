"""The held-out rows of a run: which of them are evaluated, what they are called by source, and how ranks share them."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolkit.config.data import LLMDataConfig
from toolkit.data.collate import Collator
from toolkit.distributed.rng import derive_seed
from toolkit.evaluation.text import Tokenizer, choose_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


_ROWS_HASHED_AT_ONCE = 1000


@dataclass(frozen=True)
class EvaluationRows:
    """Held-out rows and what reading them needs."""

    rows: Dataset
    """Columns as in `TokenizedRows`."""
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a generated text, beside those of the model's generation config."""
    source_names: tuple[str, ...] = ()
    """By `source_index`, where the loss of each source is reported beside the whole; else empty. See `name_sources`."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of the token ids, labels and reference texts, in order."""
        digest = hashlib.sha256()
        for batch in self.rows.select_columns(["input_ids", "labels", "target"]).with_format("numpy").iter(_ROWS_HASHED_AT_ONCE):
            for row in zip(batch["input_ids"], batch["labels"], batch["target"], strict=True):
                for cell in row:
                    content = str(cell).encode() if isinstance(cell, str) else np.asarray(cell, dtype=np.int64).tobytes()
                    digest.update(len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()

    @functools.cached_property
    def prompted(self) -> list[int]:
        """Rows that a text is generated for: all of an encoder-decoder, of a causal model those with a prompt."""
        if "prompt_length" not in self.rows.column_names:
            return list(range(len(self.rows)))
        return np.flatnonzero(self.rows.with_format("numpy")["prompt_length"][:]).tolist()

    @functools.cached_property
    def rouge_tokenizer(self) -> Tokenizer:
        """What ROUGE counts in the texts of `prompted`."""
        return choose_tokenizer(self.rows.select(self.prompted)["target"][:])

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Place in `source_names` of each row, (number of rows,) int64; zeros where no source is told from another."""
        if not self.source_names:
            return np.zeros(len(self.rows), dtype=np.int64)
        return self.rows.with_format("numpy")["source_index"][:]


def choose_rows(held_out: Dataset, num_rows: int | None) -> Dataset:
    """At most `num_rows` of the held-out rows, in their order: of each source equally many, as far as it has them.

    A source gives its rows in the order of a hash of their `row_id`, so the choice is the same on any machine, and more rows
    include those that fewer would be.
    """
    if num_rows is None or num_rows >= len(held_out):
        return held_out
    columns = held_out.with_format("numpy")
    hashes = np.array([derive_seed("evaluation row", int(row_id)) for row_id in columns["row_id"][:]])
    sources = columns["source_index"][:] if "source_index" in held_out.column_names else np.zeros_like(hashes)
    by_source = np.lexsort((hashes, sources))
    _, first_of_row, num_of_source = np.unique(sources[by_source], return_index=True, return_counts=True)
    turns = np.arange(len(by_source)) - np.repeat(first_of_row, num_of_source)
    return held_out.select(np.sort(by_source[np.lexsort((sources[by_source], turns))[:num_rows]]))


def name_sources(config: LLMDataConfig) -> tuple[str, ...]:
    """What figures call each entry of `data.mix`: its source, or `mix[i]` where several entries have the same.

    Empty without several entries, and where the held-out rows are those of `data.eval_files`, which belong to no entry.
    """
    entries = [] if config.eval_files else config.mix
    if len(entries) < 2:
        return ()
    counts = Counter(entry.source for entry in entries)
    return tuple(entry.source if counts[entry.source] == 1 else f"mix[{place}]" for place, entry in enumerate(entries))


def plan_evaluation(data: EvaluationRows, batch_size_rows: int, rank: int, world_size: int) -> list[list[int]]:
    """This rank's batches of row indices: sorted by tokens before the labels, longest first, dealt over the ranks by batches.

    The rows of a batch are of one source. Every rank gets the same number of batches; the missing ones are empty.
    """
    columns = data.rows.with_format("numpy")
    num_labels = columns["num_label_tokens"][:]
    order = np.lexsort((-num_labels, num_labels - columns["num_tokens"][:]))
    # A short list is cut finer, so that no rank is left without work.
    size = max(1, min(batch_size_rows, math.ceil(len(order) / world_size)))
    places = [np.flatnonzero(data.sources[order] == source) for source in np.unique(data.sources)]
    parts = [part[i : i + size] for part in places for i in range(0, len(part), size)]
    batches = [order[part].tolist() for part in sorted(parts, key=lambda part: int(part[0]))]
    batches += [[]] * (-len(batches) % world_size)
    return batches[rank::world_size]
