"""The first step's rows as the ranks get them: which pack each is in, and how much of it is padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.batch_plan import BatchPlan, MicroBatch
from toolkit.data.collate import Batch, Collator, load_micro_batches
from toolkit.loss import IGNORED_LABEL
from toolkit.tools.preview.row import CONTEXT, LOSS, PADDING

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The rows that are packed into one; without packing, one row."""

    rank: int
    micro_batch: int
    row_ids: list[int]
    parts: list[tuple[str, int]]
    """(kind, number of tokens) of neighbouring tokens, in order: `LOSS`, `CONTEXT`, `PADDING`. An encoder-decoder's source comes
    first, then its target, each with its padding."""
    begins: list[int]
    """For each row, the index of its first part."""
    padding: dict[str, int]
    """By side, `row`, or `source` and `target`; it follows the last row. None where the packs of a micro-batch are one row of the
    tensors (`CausalCollator.one_row`)."""


@dataclass(frozen=True, kw_only=True)
class StepView:
    """The first step of a run."""

    plan: BatchPlan
    """That of the run."""
    num_steps: int
    """Of the run."""
    positions: dict[str, int]
    """Positions of the step's tensors, over all ranks, by kind."""
    num_micro_batches: int
    """On each rank."""
    num_tensor_rows: int
    """Rows of all micro-batches' tensors."""
    packs: list[Pack]

    def find_pack(self, row_id: int) -> Pack | None:
        return next((pack for pack in self.packs if row_id in pack.row_ids), None)


def view_step(plan: BatchPlan, rows: Dataset, collator: Collator, num_steps: int) -> StepView:
    """The first step of the training `rows`, through the run's own plan, loader and collator."""
    step = plan.step(1)
    row_ids = rows.with_format("numpy")["row_id"][:]
    packs: list[Pack] = []
    num_fill = num_tensor_rows = 0
    of_ranks = [plan.micro_batches(step, rank) for rank in range(plan.world_size)]
    for rank, micro_batches in enumerate(of_ranks):
        for micro_batch, batch in load_micro_batches(rows, micro_batches, collator, num_workers=0, pin_memory=False):
            if micro_batch.is_dummy:
                num_fill += sum(batch[name].numel() for name in ("input_ids", "decoder_input_ids") if name in batch)
                continue
            num_tensor_rows += len(batch["input_ids"])
            packs += _view_packs(micro_batch, batch, rows, row_ids, rank)
    positions = {LOSS: 0, CONTEXT: 0, PADDING: num_fill}
    for kind, num in (part for pack in packs for part in pack.parts):
        positions[kind] += num
    return StepView(
        plan=plan,
        num_steps=num_steps,
        positions=positions,
        num_micro_batches=len(of_ranks[0]),
        num_tensor_rows=num_tensor_rows,
        packs=packs,
    )


def _view_packs(micro_batch: MicroBatch, batch: Batch, rows: Dataset, row_ids: np.ndarray, rank: int) -> Iterator[Pack]:
    """The packs of a micro-batch, with the padding that its tensors have."""
    num_rows, width = batch["input_ids"].shape
    is_pair = "decoder_input_ids" in batch
    for pack in micro_batch.packs:
        parts: list[tuple[str, int]] = []
        begins = []
        for row in pack:
            begins.append(len(parts))
            parts += [(CONTEXT, len(rows[row]["input_ids"]))] if is_pair else _runs(rows[row]["labels"])
        num_tokens = sum(num for _, num in parts)
        is_alone = num_rows == len(micro_batch.packs)
        padding = {"source" if is_pair else "row": width - num_tokens if is_alone else 0}
        parts += [(PADDING, num) for num in padding.values()]
        if is_pair:
            num_labels = len(rows[pack[0]]["labels"])
            padding["target"] = batch["decoder_input_ids"].shape[1] - num_labels
            parts += [(LOSS, num_labels), (PADDING, padding["target"])]
        yield Pack(
            rank=rank,
            micro_batch=micro_batch.index,
            row_ids=[int(row_ids[row]) for row in pack],
            parts=[(kind, num) for kind, num in parts if num],
            begins=begins,
            padding=padding,
        )


def _runs(labels: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Neighbouring labels that count, or do not, with their number."""
    for is_counted, group in itertools.groupby(label != IGNORED_LABEL for label in labels):
        yield LOSS if is_counted else CONTEXT, len(list(group))
