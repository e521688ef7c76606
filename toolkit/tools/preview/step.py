"""The first step's rows as the ranks get them: which pack each is in, and how much of it is padding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.batch_plan import BatchPlan, MicroBatch
from toolkit.data.collate import Batch, Collator, SummarizationCollator, load_micro_batches
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
    """One step."""

    num_processes: int
    num_steps: int
    """Of the run."""
    steps_per_epoch: int
    rows: list[int]
    """Indices of the training rows, as the batch plan takes them."""
    num_label_tokens: int
    """`N`, by which the loss of the step is divided."""
    positions: dict[str, int]
    """Positions of the step's tensors, over all ranks, by kind."""
    num_micro_batches: int
    """On each rank."""
    num_packs: int
    num_tensor_rows: int
    """Rows of all micro-batches' tensors."""
    first_packs: list[Pack]
    packs_of_rows: dict[int, Pack]
    """The packs of some rows, by row id."""


def view_step(
    plan: BatchPlan, rows: Dataset, collator: Collator, num_steps: int, most_packs: int, shown: Collection[int]
) -> StepView:
    """The first step, through the run's own plan, loader and collator.

    Args:
        rows: the training rows.
        most_packs: in `first_packs`.
        shown: ids of rows whose packs are wanted.
    """
    step = plan.step(1)
    row_ids = rows.with_format("numpy")["row_id"][:]
    first_packs: list[Pack] = []
    packs_of_rows: dict[int, Pack] = {}
    positions = dict.fromkeys((LOSS, CONTEXT, PADDING), 0)
    num_packs = num_tensor_rows = 0
    of_ranks = [plan.micro_batches(step, rank) for rank in range(plan.world_size)]
    for rank, micro_batches in enumerate(of_ranks):
        for micro_batch, batch in load_micro_batches(rows, micro_batches, collator, num_workers=0, pin_memory=False):
            if micro_batch.is_dummy:
                positions[PADDING] += sum(batch[name].numel() for name in ("input_ids", "decoder_input_ids") if name in batch)
                continue
            num_tensor_rows += len(batch["input_ids"])
            for pack in _view_packs(micro_batch, batch, rows, row_ids, collator, rank):
                num_packs += 1
                for kind, num in pack.parts:
                    positions[kind] += num
                if len(first_packs) < most_packs:
                    first_packs.append(pack)
                packs_of_rows |= {row_id: pack for row_id in pack.row_ids if row_id in shown}
    return StepView(
        num_processes=plan.world_size,
        num_steps=num_steps,
        steps_per_epoch=plan.steps_per_epoch,
        rows=list(step.rows),
        num_label_tokens=step.num_label_tokens,
        positions=positions,
        num_micro_batches=len(of_ranks[0]),
        num_packs=num_packs,
        num_tensor_rows=num_tensor_rows,
        first_packs=first_packs,
        packs_of_rows=packs_of_rows,
    )


def _view_packs(
    micro_batch: MicroBatch, batch: Batch, rows: Dataset, row_ids: np.ndarray, collator: Collator, rank: int
) -> Iterator[Pack]:
    """The packs of a micro-batch, with the padding that its tensors have."""
    num_rows, width = batch["input_ids"].shape
    is_pair = isinstance(collator, SummarizationCollator)
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


def _runs(labels: Sequence[int]) -> list[tuple[str, int]]:
    """Neighbouring labels that count, or do not, with their number."""
    counts = np.asarray(labels) != IGNORED_LABEL
    starts = np.flatnonzero(np.diff(counts, prepend=~counts[:1]))
    lengths = np.diff(np.append(starts, len(counts)))
    return [(LOSS if counts[start] else CONTEXT, int(length)) for start, length in zip(starts, lengths, strict=True)]
