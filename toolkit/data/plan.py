"""The batch plan: which rows belong to step n, and how they are cut over ranks and micro-batches.

A step's rows depend on (row lengths, seed, epoch, global batch size) alone, never on the number of processes, the
micro-batch size or a restart. Only then are they cut: into micro-batches of similar length (little padding), each dealt
over the ranks so that all have about the same number of tokens to work on at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from toolkit.distributed import derive_seed
from toolkit.errors import UserError

LENGTH_NOISE = 0.05
"""Rows are sorted by their length times a random factor of up to so much more or less than 1."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank runs forward and backward once."""

    step: int
    """1-based optimizer step."""
    index: int
    """0-based place in the step."""
    is_last: bool
    """Whether the optimizer steps after it."""
    rows: tuple[int, ...]
    """Indices into the tokenized rows. Never empty: see `counts`."""
    counts: bool
    """False where this rank has no row here: it runs one row with all labels ignored, to keep collectives in step."""


@dataclass(frozen=True)
class Step:
    """One optimizer update over one global batch."""

    step: int
    epoch: int
    """0-based epoch."""
    rows: tuple[int, ...]
    """The global batch: indices into the tokenized rows."""
    num_label_tokens: int
    """`N`: label tokens of the global batch, known on every rank without communication."""
    num_tokens: int
    """Source and label tokens of the global batch, without padding."""


@dataclass
class BatchPlan:
    """Steps of a run over rows of known lengths.

    Args:
        source_lengths: int array, tokens of each row's source.
        target_lengths: int array, label tokens of each row's target.
    """

    source_lengths: np.ndarray
    target_lengths: np.ndarray
    global_batch_size_rows: int
    micro_batch_size_rows: int
    seed: int
    world_size: int
    _epoch_cache: tuple[int, list[np.ndarray]] = field(default=(-1, []), repr=False)

    def __post_init__(self) -> None:
        check_global_batch_size(self.global_batch_size_rows, self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch; the last may be smaller and is used."""
        return math.ceil(len(self.source_lengths) / self.global_batch_size_rows)

    @property
    def micro_batches_per_full_step(self) -> int:
        """Forward passes of each rank in a step with a full global batch."""
        return math.ceil(self.global_batch_size_rows / (self.world_size * self.micro_batch_size_rows))

    def step(self, step: int) -> Step:
        """The global batch of the 1-based `step`."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        if self._epoch_cache[0] != epoch:
            self._epoch_cache = (epoch, self._epoch_batches(epoch))
        rows = self._epoch_cache[1][place]
        num_label_tokens = int(self.target_lengths[rows].sum())
        num_tokens = num_label_tokens + int(self.source_lengths[rows].sum())
        return Step(step, epoch, tuple(rows.tolist()), num_label_tokens, num_tokens)

    def micro_batches(self, step: Step, rank: int) -> list[MicroBatch]:
        """This rank's cut of a step; every rank gets the same number of micro-batches."""
        rows = np.array(step.rows)
        costs = self.source_lengths[rows] + self.target_lengths[rows]
        slots = cut(rows, costs, self.world_size, self.micro_batch_size_rows)
        filler = (step.rows[0],)
        return [
            MicroBatch(step.step, i, i == len(slots) - 1, tuple(ranks[rank]) or filler, bool(ranks[rank]))
            for i, ranks in enumerate(slots)
        ]

    def iterate(self, first_step: int, last_step: int, rank: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the steps `first_step` to `last_step`, both included."""
        for step in range(first_step, last_step + 1):
            yield from self.micro_batches(self.step(step), rank)

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """Length-bucketed global batches: sort rows by length with a little noise, cut, shuffle the batches.

        The noise makes other batches every epoch; at 5 % it costs about 2 % more padding than an exact sort. The smaller
        rest is taken out at a random length and comes last.
        """
        num_rows, size = len(self.source_lengths), self.global_batch_size_rows
        random = np.random.Generator(np.random.PCG64(derive_seed("rows", self.seed, epoch)))
        noisy_lengths = (self.source_lengths + self.target_lengths) * random.uniform(1 - LENGTH_NOISE, 1 + LENGTH_NOISE, num_rows)
        order = np.argsort(noisy_lengths, kind="stable")
        num_full, num_rest = divmod(num_rows, size)
        start = size * int(random.integers(num_full + 1))
        rest = order[start : start + num_rest]
        full = np.delete(order, slice(start, start + num_rest)).reshape(num_full, size)
        return [full[i] for i in random.permutation(num_full)] + [rest] * (num_rest > 0)


def check_global_batch_size(global_batch_size_rows: int, world_size: int) -> None:
    """Refuse a global batch that leaves a rank without a row.

    Raises:
        UserError: naming both numbers.
    """
    if global_batch_size_rows < world_size:
        raise UserError(
            f"train.global_batch_size_rows is {global_batch_size_rows}, smaller than the {world_size} processes: give each at "
            f"least one row, {world_size} or more"
        )


def cut(rows: np.ndarray, costs: np.ndarray, num_ranks: int, micro_batch_size_rows: int) -> list[list[list[int]]]:
    """Cut a global batch: `result[micro_batch][rank]` is a list of rows, at most `micro_batch_size_rows` long.

    Rows are sorted by cost (`costs[i]` tokens of `rows[i]`), longest first, and taken in groups of
    `num_ranks x micro_batch_size_rows`; each group is dealt over the ranks forth and back, so that ranks get rows of about
    equal cost and pad little.
    """
    rows = rows[np.argsort(-costs, kind="stable")]
    group = num_ranks * micro_batch_size_rows
    result = []
    for start in range(0, len(rows), group):
        dealt: list[list[int]] = [[] for _ in range(num_ranks)]
        for i, row in enumerate(rows[start : start + group].tolist()):
            lap, place = divmod(i, num_ranks)
            dealt[place if lap % 2 == 0 else num_ranks - 1 - place].append(row)
        result.append(dealt)
    return result
