"""The first step's rows as the ranks get them: which pack each is in, how much of it is padding, and that in words and bars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.data.batch_plan import BatchPlan, MicroBatch
from toolkit.data.collate import Batch, Collator, load_micro_batches
from toolkit.errors import plural
from toolkit.loss import IGNORED_LABEL
from toolkit.objectives.objective import Objective
from toolkit.tools.report.sections import Heading, Lines, percent

if TYPE_CHECKING:
    from datasets import Dataset

LOSS, CONTEXT, PADDING, LOST = "loss", "context", "padding", "lost"
"""What a token is for: it counts in the loss, is context, is padding; or it was cut off."""
NAMES = {LOSS: "counts in the loss", CONTEXT: "context", PADDING: "padding", LOST: "cut off"}
MOST_PACKS = 24


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
    num_steps: int
    positions: dict[str, int]
    """Positions of the step's tensors, over all ranks, by kind."""
    num_micro_batches: int
    num_tensor_rows: int
    packs: list[Pack]
    counted: str = "label token"
    """As in `Objective.counted`."""

    def find_pack(self, row_id: int) -> Pack | None:
        return next((pack for pack in self.packs if row_id in pack.row_ids), None)


class Legend(NamedTuple):
    """The kinds of tokens, or of parts of bars."""

    kinds: Sequence[str]
    is_of_bars: bool = False


class Bar(NamedTuple):
    """A pack, as long as its share of the longest one that is shown."""

    pack: Pack
    longest: int
    label: str


def view_step(objective: Objective, plan: BatchPlan, rows: Dataset, collator: Collator, num_steps: int) -> StepView:
    """The first step of the training `rows`, through the run's own plan, loader and collator."""
    row_ids, packs = rows.with_format("numpy")["row_id"][:], list[Pack]()
    num_fill = num_tensor_rows = 0
    of_ranks = [plan.micro_batches(plan.step(1), rank) for rank in range(plan.world_size)]
    for rank, micro_batches in enumerate(of_ranks):
        for micro_batch, batch in load_micro_batches(rows, micro_batches, collator, num_workers=0, pin_memory=False):
            if micro_batch.is_dummy:
                num_fill += sum(batch[name].numel() for name in objective.inputs)
                continue
            num_tensor_rows += len(batch["input_ids"])
            packs += _view_packs(objective, micro_batch, batch, rows, row_ids, rank)
    positions = {LOSS: 0, CONTEXT: 0, PADDING: num_fill}
    for kind, num in (part for pack in packs for part in pack.parts):
        positions[kind] += num
    counts = {"num_steps": num_steps, "num_micro_batches": len(of_ranks[0]), "num_tensor_rows": num_tensor_rows}
    return StepView(plan=plan, positions=positions, packs=packs, counted=objective.counted, **counts)


def _view_packs(
    objective: Objective, micro_batch: MicroBatch, batch: Batch, rows: Dataset, row_ids: np.ndarray, rank: int
) -> Iterator[Pack]:
    """The packs of a micro-batch, with the padding that its tensors have."""
    sides, num_rows = [*objective.limits], len(batch[objective.inputs[-1]])
    widths = [batch[name].shape[1] for name in objective.inputs]
    for pack in micro_batch.packs:
        parts: list[tuple[str, int]] = []
        begins, padding = [], dict.fromkeys(sides, 0)
        # Documents that are not packed are rows of the tensors, each with padding of its own.
        is_apart = len(pack) == 1 and num_rows == objective.num_documents * len(micro_batch.packs)
        for row in pack:
            begins.append(len(parts))
            documents = objective.documents(rows[row])
            if objective.label_side:
                parts.append((CONTEXT, len(documents[0]["input_ids"])))
                _pad(parts, padding, sides[0], widths[0] - parts[-1][1])
            for document in documents:
                for is_counted, group in itertools.groupby(label != IGNORED_LABEL for label in document["labels"]):
                    parts.append((LOSS if is_counted else CONTEXT, len(list(group))))
                if is_apart:
                    _pad(parts, padding, sides[-1], widths[-1] - len(document["labels"]))
        if num_rows == len(micro_batch.packs) and not objective.label_side:
            _pad(parts, padding, sides[0], widths[0] - sum(num for _, num in parts))
        yield Pack(
            rank=rank,
            micro_batch=micro_batch.index,
            row_ids=[int(row_ids[row]) for row in pack],
            parts=[(kind, num) for kind, num in parts if num],
            begins=begins,
            padding=padding,
        )


def _pad(parts: list[tuple[str, int]], padding: dict[str, int], side: str, num: int) -> None:
    parts.append((PADDING, num))
    padding[side] += num


def describe_step(step: StepView) -> Iterator[Any]:
    """The step, with its packs as bars."""
    first, num_processes = step.plan.step(1), step.plan.world_size
    yield Heading(f"Step 1 of {step.num_steps:,} ({step.plan.steps_per_epoch:,} an epoch)")
    total = sum(step.positions.values())
    shares = ", ".join(f"{percent(num, total)} {NAMES[kind].replace('counts', 'count')}" for kind, num in step.positions.items())
    rows = f"{plural(step.num_tensor_rows, 'row')} of the tensors"
    drawn = step.packs[:MOST_PACKS]
    if any(len(pack.row_ids) > 1 for pack in step.packs):
        rows = f"{plural(len(step.packs), 'pack')} in {rows}"
    yield Lines(
        [
            f"{plural(len(first.rows), 'row')}; the loss is divided by N = {plural(first.num_label_tokens, step.counted)}",
            f"{plural(step.num_micro_batches, 'micro-batch')} on each of {plural(num_processes, 'process')}, {rows}; of "
            f"{total:,} positions {shares}",
        ]
    )
    yield Legend((LOSS, CONTEXT, PADDING), is_of_bars=True)
    longest = max(sum(num for _, num in pack.parts) for pack in drawn)
    for (rank, micro_batch), packs in itertools.groupby(drawn, key=lambda pack: (pack.rank, pack.micro_batch)):
        yield Heading(f"Process {rank}, micro-batch {micro_batch + 1}", 4)
        yield from (Bar(pack, longest, name_rows(pack.row_ids)) for pack in packs)
    if more := len(step.packs) - len(drawn):
        yield Lines([f"{plural(more, 'more pack')} {'is' if more == 1 else 'are'} not drawn"], "quiet")


def name_rows(row_ids: Sequence[int]) -> str:
    """Rows by their ids."""
    return f"{'row' if len(row_ids) == 1 else 'rows'} {', '.join(map(str, row_ids))}"
