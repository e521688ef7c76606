"""The rows that a run evaluates: which rows of the evaluation split, under which source names, in which batches on which rank."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolkit.config.data import LLMDataConfig
from toolkit.config.paths import split_own_source
from toolkit.data.collate import Collator
from toolkit.distributed.rng import derive_seed
from toolkit.evaluation.metrics import TextMetric
from toolkit.evaluation.words import Tokenizer, choose_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


_ROWS_HASHED_AT_ONCE = 1000


@dataclass(frozen=True)
class EvaluationRows:
    """Evaluation rows with the tokenizer and collator to read them."""

    rows: Dataset
    """Columns as in `TokenizedRows`."""
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a generated text, in addition to those of the model's generation config."""
    source_names: tuple[str, ...] = ()
    """Names by `source_index` if the loss is also reported per source; else empty. See `name_sources`."""
    metrics: tuple[TextMetric, ...] = ()
    """Metrics of generated texts beside ROUGE."""

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
        """Indices of the rows to generate a text for: all for an encoder-decoder, those with a prompt for a causal model."""
        return np.flatnonzero(self.has_prompt).tolist()

    @functools.cached_property
    def has_prompt(self) -> np.ndarray:
        """Whether each row is `prompted`, bool (number of rows,)."""
        if "prompt_length" not in self.rows.column_names:
            return np.ones(len(self.rows), dtype=np.bool_)
        return self.rows.with_format("numpy")["prompt_length"][:] > 0

    @functools.cached_property
    def rouge_tokenizer(self) -> Tokenizer:
        """How ROUGE splits the texts of the `prompted` rows into words."""
        return choose_tokenizer(self.references)

    @property
    def references(self) -> list[str]:
        """The true texts of the `prompted` rows."""
        return self.rows.select(self.prompted)["target"][:]

    @property
    def prompted_ids(self) -> list[int]:
        """The `row_id` of each of the `prompted` rows."""
        return self.rows.select(self.prompted)["row_id"][:]

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Index into `source_names` of each row, (number of rows,) int64; zeros without source names."""
        if not self.source_names:
            return np.zeros(len(self.rows), dtype=np.int64)
        return self.rows.with_format("numpy")["source_index"][:]


def choose_rows(held_out: Dataset, num_rows: int | None) -> Dataset:
    """At most `num_rows` of the evaluation split, in order: equally many of each source, as far as it has them.

    Rows of a source are chosen in the order of a hash of their `row_id`, so the choice is the same on any machine, and a larger
    choice includes a smaller one.
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


def even_places(num: int, most: int) -> list[int]:
    """The places of all of `num` things, or of `most` of them at even distances."""
    return [place * num // most for place in range(most)] if num > most else list(range(num))


def name_sources(config: LLMDataConfig) -> tuple[str, ...]:
    """The name of each entry of `data.mix` in figures: its source, or `mix[i]` if several entries have the same source.

    Empty with fewer than two entries, and with `data.eval_files`, whose rows belong to no entry.
    """
    entries = [] if config.eval_files else config.mix
    if len(entries) < 2:
        return ()
    names = [entry.source.rpartition("/")[2] if split_own_source(entry.source) else entry.source for entry in entries]
    return tuple(name if names.count(name) == 1 else f"mix[{place}]" for place, name in enumerate(names))


def plan_evaluation(data: EvaluationRows, batch_size_rows: int, rank: int, world_size: int) -> list[list[int]]:
    """This rank's batches of row indices. Rows are sorted by tokens before the labels, longest first; batches are dealt out.

    All rows of a batch have the same source. Every rank gets the same number of batches; the last ones may be empty.
    """
    columns = data.rows.with_format("numpy")
    num_labels = columns["num_label_tokens"][:]
    order = np.lexsort((-num_labels, num_labels - columns["num_tokens"][:]))
    # Few rows are cut into smaller batches, so that no rank is left without work.
    size = max(1, min(batch_size_rows, math.ceil(len(order) / world_size)))
    places = [np.flatnonzero(data.sources[order] == source) for source in np.unique(data.sources)]
    parts = [part[i : i + size] for part in places for i in range(0, len(part), size)]
    batches = [order[part].tolist() for part in sorted(parts, key=lambda part: int(part[0]))]
    batches += [[]] * (-len(batches) % world_size)
    return batches[rank::world_size]
