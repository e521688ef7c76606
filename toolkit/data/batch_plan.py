"""The batch plan: which rows belong to step n, and which rank and micro-batch each of them goes to.

A step's rows depend only on (row lengths, seed, epoch, global batch size), never on the number of processes, the
micro-batch size, packing or a restart. The rows of a step are then packed (or not) and cut into micro-batches of similar
length, which keeps padding low. Each micro-batch is dealt over the ranks so that all of them work on about as many tokens
at the same time.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain

import numpy as np

from toolkit.config.schema import TrainConfig, as_written
from toolkit.distributed.rng import derive_seed
from toolkit.errors import UserError

LENGTH_NOISE = 0.05
"""Rows are sorted by their length times a random factor, at most this far from 1."""

Pack = tuple[int, ...]
"""Rows (indices into the tokenized rows) that share one row of the tensors."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass of one rank."""

    step: int
    """1-based optimizer step."""
    index: int
    """0-based position in the step."""
    is_last: bool
    """Whether the optimizer steps after this micro-batch."""
    packs: tuple[Pack, ...]
    """Never empty, see `is_dummy`. Without packing, each pack holds one row."""
    is_dummy: bool
    """This rank has no rows here. It runs one row with all labels ignored, so that the collectives of all ranks match."""

    @property
    def rows(self) -> Pack:
        """The rows of all packs; empty for a dummy."""
        return tuple(chain.from_iterable(self.packs)) if not self.is_dummy else ()


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
    """Tokens of the global batch, without padding."""


@dataclass(frozen=True)
class Mix:
    """Several sources in one dataset, each with its share of an epoch."""

    source_of_row: np.ndarray
    """int array: the source of each row. Each source has at least one row (`data.tokens.causal.report`)."""
    weights: tuple[float, ...]
    """One positive weight per source; only their ratios matter."""


@dataclass
class BatchPlan:
    """The steps of a run over rows of known lengths.

    Args:
        num_tokens: int array, the tokens of each row.
        num_label_tokens: int array, the tokens of each row that count in the loss.
        train: the sizes of a step and a micro-batch, and the seed.
        bucket_by_length: whether a step's rows have similar lengths; otherwise they are drawn at random.
        pack_length_tokens: maximum tokens of a pack; None: rows are not packed.
        mix: sources with weights; None: an epoch takes every row once.
    """

    num_tokens: np.ndarray
    num_label_tokens: np.ndarray
    train: TrainConfig
    world_size: int
    bucket_by_length: bool = True
    pack_length_tokens: int | None = None
    mix: Mix | None = None
    _first_steps: list[int] = field(default_factory=lambda: [1], repr=False)
    """First step of each epoch known so far. With a token budget, an epoch must be drawn before its steps can be counted."""
    _epoch_cache: tuple[int, list[np.ndarray]] = field(default=(-1, []), repr=False)

    def __post_init__(self) -> None:
        check_global_batch_size(self.train, self.world_size)
        budget, longest = self.train.global_batch_size_tokens, int(self.num_tokens.max(initial=0))
        if budget is not None and longest > budget:
            raise UserError(
                f"train.global_batch_size_tokens is {budget}, less than the longest row ({longest} tokens): raise it, or cut "
                "rows to fewer tokens"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in the first epoch. The last one may be smaller; it is used too."""
        return self.num_steps(1)

    def num_steps(self, num_epochs: float) -> int:
        """Number of global batches in the first `num_epochs` epochs; those of a part of an epoch are rounded up."""
        epoch, part = divmod(as_written(num_epochs), 1)
        first_step = self._first_step(epoch)
        return first_step - 1 + (math.ceil(part * (self._first_step(epoch + 1) - first_step)) if part else 0)

    def epoch(self, step: int) -> int:
        """The 0-based epoch of a step."""
        while self._first_steps[-1] <= step:
            self._first_step(len(self._first_steps))
        return bisect_right(self._first_steps, step) - 1

    def is_due(self, step: int, every_epochs: float) -> bool:
        """Whether `step` is the last of the first k * `every_epochs` epochs, for a whole number k above 0."""
        every = as_written(every_epochs)
        return self._num_epochs(step) // every > self._num_epochs(step - 1) // every

    def step(self, step: int) -> Step:
        """Return the global batch of the 1-based `step`."""
        epoch = self.epoch(step)
        rows = self._batches(epoch)[step - self._first_steps[epoch]]
        return Step(step, epoch, tuple(rows.tolist()), int(self.num_label_tokens[rows].sum()), int(self.num_tokens[rows].sum()))

    def micro_batches(self, step: Step, rank: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step; every rank gets equally many."""
        packs: list[Pack] = [(row,) for row in step.rows]
        if self.pack_length_tokens is not None:
            rows = np.array(step.rows)
            packs = [tuple(rows[places].tolist()) for places in pack_best_fit(self.num_tokens[rows], self.pack_length_tokens)]
        costs = np.array([self.num_tokens[list(pack)].sum() for pack in packs])
        slots = cut(np.arange(len(packs)), costs, self.world_size, self.train.micro_batch_size_rows)
        filler = ((step.rows[0],),)
        return [
            MicroBatch(step.step, i, i == len(slots) - 1, tuple(packs[p] for p in ranks[rank]) or filler, not ranks[rank])
            for i, ranks in enumerate(slots)
        ]

    def iterate(self, first_step: int, last_step: int, rank: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the steps `first_step` to `last_step`, both included."""
        for step in range(first_step, last_step + 1):
            yield from self.micro_batches(self.step(step), rank)

    def shapes(
        self, lengths: tuple[np.ndarray, ...], num_steps: int, rank: int, *, one_row: bool = False
    ) -> Iterator[tuple[int, ...]]:
        """The shape of each micro-batch of this rank's first `num_steps` steps: its rows, and the most tokens of each of
        `lengths`, which are counts by row, as of sources and of targets. With `one_row`, a micro-batch of packs becomes one row,
        as `CausalCollator.one_row` says."""
        for micro_batch in self.iterate(1, num_steps, rank):
            packs = [list(pack) for pack in micro_batch.packs]
            if one_row and any(len(pack) > 1 for pack in packs):
                packs = [list(micro_batch.rows)]
            yield len(packs), *(max(int(counts[pack].sum()) for pack in packs) for counts in lengths)

    def _first_step(self, epoch: int) -> int:
        while len(self._first_steps) <= epoch:
            if self.train.global_batch_size_tokens is None:
                num_batches = math.ceil(len(self.num_tokens) / self.train.global_batch_size_rows)
            else:
                num_batches = len(self._batches(len(self._first_steps) - 1))
            self._first_steps.append(self._first_steps[-1] + num_batches)
        return self._first_steps[epoch]

    def _num_epochs(self, step: int) -> Fraction:
        """Epochs done after `step`."""
        if step < 1:
            return Fraction(0)
        epoch = self.epoch(step)
        first_step = self._first_step(epoch)
        return epoch + Fraction(step + 1 - first_step, self._first_step(epoch + 1) - first_step)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """An epoch's global batches; those of the epoch asked for last are cached."""
        if self._epoch_cache[0] != epoch:
            self._epoch_cache = (epoch, self._draw_batches(epoch))
        return self._epoch_cache[1]

    def _draw_batches(self, epoch: int) -> list[np.ndarray]:
        """Cut an epoch's rows into batches: in random order, or sorted by noisy length with the batches shuffled.

        The noise gives every epoch different batches; at 5 % it costs about 2 % more padding than an exact sort. If a batch is
        a number of rows, the smaller rest batch is taken at a random length and comes last.
        """
        random = np.random.Generator(np.random.PCG64(derive_seed("rows", self.train.seed, epoch)))
        rows = np.arange(len(self.num_tokens)) if self.mix is None else draw_mix(self.mix, random)
        if self.bucket_by_length:
            noisy_lengths = self.num_tokens[rows] * random.uniform(1 - LENGTH_NOISE, 1 + LENGTH_NOISE, len(rows))
            rows = rows[np.argsort(noisy_lengths, kind="stable")]
        else:
            rows = random.permutation(rows)
        # A batch is a budget of tokens.
        if self.train.global_batch_size_tokens is not None:
            batches = fill(rows, self.num_tokens[rows], self.train.global_batch_size_tokens)
            return [batches[i] for i in random.permutation(len(batches))] if self.bucket_by_length else batches
        # A batch is a number of rows.
        size = self.train.global_batch_size_rows
        num_full, num_rest = divmod(len(rows), size)
        start = size * (int(random.integers(num_full + 1)) if self.bucket_by_length else num_full)
        rest = rows[start : start + num_rest]
        full = np.delete(rows, slice(start, start + num_rest)).reshape(num_full, size)
        order = random.permutation(num_full) if self.bucket_by_length else range(num_full)
        return [full[i] for i in order] + [rest] * (num_rest > 0)


def check_global_batch_size(train: TrainConfig, world_size: int) -> None:
    """Refuse a global batch with fewer rows than ranks, by a `UserError` with both numbers."""
    if train.global_batch_size_tokens is None and train.global_batch_size_rows < world_size:
        raise UserError(
            f"train.global_batch_size_rows is {train.global_batch_size_rows}, smaller than the {world_size} processes: give "
            f"each at least one row, {world_size} or more"
        )


def draw_mix(mix: Mix, random: np.random.Generator) -> np.ndarray:
    """Draw an epoch in which each source has its share; an epoch has as many rows as the dataset.

    If a source's share is k.f times its rows, each row is drawn k times, and a random fraction f of them once more.
    """
    num_rows = len(mix.source_of_row)
    ends = np.round(np.cumsum(mix.weights) / np.sum(mix.weights) * num_rows).astype(int)
    drawn = []
    for source, quota in enumerate(np.diff(ends, prepend=0).tolist()):
        rows = np.flatnonzero(mix.source_of_row == source)
        num_passes, num_more = divmod(quota, len(rows))
        drawn += [rows] * num_passes + [rows[np.sort(random.permutation(len(rows))[:num_more])]]
    return np.concatenate(drawn)


def fill(rows: np.ndarray, num_tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut rows, in order, into the largest batches of at most `budget` tokens (`num_tokens[i]` of `rows[i]`)."""
    ends = np.cumsum(num_tokens)
    batches, start, used = [], 0, 0
    while start < len(rows):
        stop = int(np.searchsorted(ends, used + budget, side="right"))
        batches.append(rows[start:stop])
        start, used = stop, int(ends[stop - 1])
    return batches


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Combine rows, of which none is above `capacity`, into packs of at most so many tokens: indices into `lengths`, by pack.

    Best-fit decreasing: each row, longest first, goes into the fullest pack that still has room for it. It uses at most 11/9 of
    the minimum number of packs, plus one (Johnson, 1973), and depends only on the lengths.
    """
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens free, pack), sorted
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        assert length <= capacity, "rows are cut to the capacity before"
        fullest = bisect_left(spaces, (length, -1))
        if fullest == len(spaces):
            packs.append([])
            space, pack = capacity, len(packs) - 1
        else:
            space, pack = spaces.pop(fullest)
        packs[pack].append(place)
        insort(spaces, (space - length, pack))
    return packs


def cut(rows: np.ndarray, costs: np.ndarray, num_ranks: int, micro_batch_size_rows: int) -> list[list[list[int]]]:
    """Cut a global batch: `result[micro_batch][rank]` is a list of at most `micro_batch_size_rows` rows.

    Rows are sorted by cost (`costs[i]` tokens of `rows[i]`), highest first, and taken in groups of
    `num_ranks x micro_batch_size_rows`. Each group is dealt over the ranks back and forth, so that ranks get about equal
    costs and little padding.
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
