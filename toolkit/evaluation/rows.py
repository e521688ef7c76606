"""The rows that a run evaluates: which rows of the evaluation split, in which named sets, in which batches on which rank.

Metrics of a named set are `NAME/loss` and the like. The `measured_on` of an evaluation has a hash of each set's rows in `sets`,
beside that of all rows, so it says which lines of a run compare.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.collate import Collator
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.data.tokens.special_tokens import Kept
from toolkit.distributed.rng import derive_seed
from toolkit.evaluation.metrics import TextMetric
from toolkit.evaluation.rouge import Tokenizer, choose_tokenizer
from toolkit.models.position_limits import group_by_rope

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.objectives.objective import Objective


@dataclass(frozen=True)
class EvaluationRows:
    """Evaluation rows with the tokenizer and collator to read them."""

    rows: Dataset
    """Columns as in `TokenizedRows`."""
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    objective: Objective
    """What is evaluated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a generated text, in addition to those of the model's generation config."""
    inputs: tuple[tuple[int, str], ...] = ()
    """As `TokenizedRows.sets`."""
    metrics: tuple[TextMetric, ...] = ()
    """Metrics of generated texts beside ROUGE."""
    kept_tokens: Kept = field(default_factory=dict)
    """As `TokenizedRows.kept_tokens`."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of the token ids, labels and reference texts, in order."""
        digest = hashlib.sha256()
        for batch in self.rows.select_columns(["input_ids", "labels", "target"]).with_format("numpy").iter(1000):
            for row in zip(batch["input_ids"], batch["labels"], batch["target"], strict=True):
                for cell in row:
                    kept = cell if isinstance(cell, str) or cell.dtype.kind == "f" else cell.astype(np.int64)
                    content = kept.encode() if isinstance(kept, str) else kept.tobytes()
                    digest.update(len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()

    @functools.cached_property
    def prompted(self) -> list[int]:
        """Indices of the rows to generate a text for: all for an encoder-decoder, those with a prompt for a causal model."""
        if "prompt_length" not in self.rows.column_names:
            return list(range(len(self.rows)))
        return np.flatnonzero(self.rows.with_format("numpy")["prompt_length"][:]).tolist()

    @functools.cached_property
    def rouge_tokenizer(self) -> Tokenizer:
        """How ROUGE splits the texts of the `prompted` rows into words."""
        return choose_tokenizer(self.references)

    @property
    def references(self) -> list[str]:
        """The true texts of the `prompted` rows."""
        return self.rows.select(self.prompted)["target"][:]

    @functools.cached_property
    def set_names(self) -> tuple[str, ...]:
        """The names in `inputs`, each once; an empty one is of rows without a set."""
        return tuple(dict.fromkeys(name for _, name in self.inputs)) or ("",)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Index into `set_names` of each row, (number of rows,) int64. Row ids count through the inputs."""
        if len(self.set_names) == 1:
            return np.zeros(len(self.rows), dtype=np.int64)
        ends = np.cumsum([num_rows for num_rows, _ in self.inputs])
        row_ids = self.rows.with_format("numpy")["row_id"][:] % ROW_IDS_OF_A_PIECE
        of_inputs = np.array([self.set_names.index(name) for _, name in self.inputs])
        return of_inputs[np.searchsorted(ends, row_ids, side="right")]

    @functools.cached_property
    def sets(self) -> dict[str, EvaluationRows]:
        """The rows of each named set that has some."""
        found = {name: np.flatnonzero(self.places == place) for place, name in enumerate(self.set_names) if name}
        return {name: replace(self, rows=self.rows.select(rows), inputs=()) for name, rows in found.items() if len(rows)}


def choose_rows(data: EvaluationRows, num_rows: int | None) -> EvaluationRows:
    """At most `num_rows` of the evaluation split, in order: equally many of each set, as far as it has them.

    Rows of a set are chosen in the order of a hash of their `row_id`, so the choice is the same on any machine, and a larger
    choice includes a smaller one.
    """
    if num_rows is None or num_rows >= len(data.rows):
        return data
    row_ids, of_rows = data.rows.with_format("numpy")["row_id"][:], data.places
    hashes = np.array([derive_seed("evaluation row", int(row_id)) for row_id in row_ids])
    by_set = np.lexsort((hashes, of_rows))
    _, first_of_row, num_of_set = np.unique(of_rows[by_set], return_index=True, return_counts=True)
    turns = np.arange(len(by_set)) - np.repeat(first_of_row, num_of_set)
    return replace(data, rows=data.rows.select(np.sort(by_set[np.lexsort((of_rows[by_set], turns))[:num_rows]])))


def even_places(num: int, most: int) -> list[int]:
    """The places of all of `num` things, or of `most` of them at even distances."""
    return [place * num // most for place in range(most)] if num > most else list(range(num))


def plan_evaluation(
    data: EvaluationRows,
    batch_size_rows: int,
    rank: int,
    world_size: int,
    ropes: list[tuple[str, int]] | None = None,
    new: int = 0,
) -> list[list[int]]:
    """This rank's batches of row indices. Rows are sorted by tokens before the labels, longest first; batches are dealt out.

    All rows of a batch have the same set and, for `ropes` of `list_shared_ropes`, the same groups, of their loss and
    of `new` generated tokens. Every rank gets the same number of batches; the last ones may be empty.
    """
    columns = data.rows.with_format("numpy")
    num_labels = columns["num_label_tokens"][:]
    order = np.lexsort((-num_labels, num_labels - columns["num_tokens"][:]))
    # Few rows are cut into smaller batches, so that no rank is left without work.
    size = max(1, min(batch_size_rows, math.ceil(len(order) / world_size)))
    groups = data.places
    if ropes:
        prompts = columns["prompt_length"][:] if "prompt_length" in data.rows.column_names else np.zeros_like(num_labels)
        keys = [
            (place, group_by_rope(ropes, row, row), group_by_rope(ropes, prompt, prompt + new))
            for place, row, prompt in zip(groups.tolist(), columns["num_tokens"][:].tolist(), prompts.tolist(), strict=True)
        ]
        groups = np.array([sorted({*keys}).index(key) for key in keys])
    of_sets = [np.flatnonzero(groups[order] == group) for group in np.unique(groups)]
    parts = [part[i : i + size] for part in of_sets for i in range(0, len(part), size)]
    batches = [order[part].tolist() for part in sorted(parts, key=lambda part: int(part[0]))]
    batches += [[]] * (-len(batches) % world_size)
    return batches[rank::world_size]


def split_metric(metric: str, sets: Collection[str]) -> tuple[str, str]:
    """`news/rougeL` → `news` and `rougeL`, where `news` is one of the sets; a figure of all rows has the set `""`."""
    first, _, rest = metric.partition("/")
    return (first, rest) if first in sets else ("", metric)


def hashes_of_sets(line: Mapping[str, Any]) -> dict[str, str]:
    """By name, the sets in the `measured_on` of an evaluation's line; older runs have none."""
    return (line.get("measured_on") or {}).get("sets") or {}


def of_all_rows(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `measured_on` of a line without its sets: what decides the figures of all rows."""
    measured_on = line.get("measured_on")
    return measured_on and {key: value for key, value in measured_on.items() if key != "sets"}


def list_by_set(lines: Mapping[str, Mapping[str, Any]], sets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By label, the figures of all rows; then those of each of `sets` by their plain names, labelled `NAME: label`.

    A line that was measured on other rows under a set's name gives it none.
    """
    listed = {label: {key: line[key] for key in line if not split_metric(key, sets)[0]} for label, line in lines.items()}
    for name, rows in sets.items():
        for label, line in lines.items():
            figures = {key.removeprefix(f"{name}/"): line[key] for key in line if split_metric(key, sets)[0] == name}
            if figures and hashes_of_sets(line).get(name, rows) == rows:
                listed[f"{name}: {label}"] = figures
    return listed
