"""Searches for the largest micro-batch that fits, and for a change of the preset with which a run fits.

They trace two models with few blocks and extrapolate: memory in every phase of a micro-batch grows linearly with the number of
blocks.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.errors import one_line
from toolkit.tools.plan.strategy import Strategy
from toolkit.tools.plan.subject import Subject, find_stacks, trace_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEW_BLOCKS = (3, 5)
"""Stack lengths to extrapolate from; with fewer blocks, the first and the last prefetch each other."""
MOST_ROWS = 4096
"""Upper limit of the search for the largest micro-batch."""


def show_progress(doing: str) -> None:
    """A line on stderr: stdout has the result alone, which may be JSON."""
    print(one_line(f"planning: {doing}"), file=sys.stderr, flush=True)


def largest_micro_batch(subject: Subject, strategy: Strategy, usable: int) -> int:
    """Most rows of a micro-batch that fit in `usable` bytes: secant search with bisection bounds, as memory is near linear."""
    show_progress("searching for the largest micro-batch that fits")
    fits, fails, rows = 0, MOST_ROWS + 1, 1
    before = (0, 0)
    while fails - fits > 1:
        needed = estimate_peak(subject, strategy, rows)
        fits, fails = (rows, fails) if needed <= usable else (fits, rows)
        slope = max(1.0, (needed - before[1]) / (rows - before[0])) if before[0] else float("inf")
        guess = rows + int((usable - needed) // slope) if before[0] else 2
        before = rows, needed
        rows = min(max(guess, fits + 1), fails - 1)
    return fits


def find_change(subject: Subject, strategy: Strategy, usable: int) -> str | None:
    """The first change with which the micro-batch fits; tries each alone, then each on top of those before it."""
    show_progress("searching for a change of the preset with which it fits")
    changes = list(_changes(strategy))
    for chosen in [*([change] for change in changes), *(changes[:end] for end in range(2, len(changes) + 1))]:
        together = {key: value for _, change in chosen for key, value in change.items()}
        changed = dataclasses.replace(strategy, **together)
        if estimate_peak(subject, changed, subject.config.train.micro_batch_size_rows) <= usable:
            return " and ".join(text for text, change in chosen if change.items() <= together.items())
    return None


def _changes(strategy: Strategy) -> Iterable[tuple[str, dict[str, Any]]]:
    """Changes of a preset that save memory, the cheapest in time first."""
    whole: dict[str, Any] = {"num_shards": strategy.num_processes, "num_replicas": 1}
    sharded = {} if strategy.is_fsdp else whole | {"kind": "fsdp2"}
    modes = {"none": ("selective", "full"), "selective": ("full",), "full": ()}[strategy.activation_checkpointing]
    if strategy.is_compiled:
        modes = modes[-1:]
    recomputing = [(f"train.activation_checkpointing: {mode}", {"activation_checkpointing": mode}) for mode in modes]
    if strategy.num_processes == 1:
        yield from recomputing
    if not strategy.is_fsdp:
        if strategy.num_processes > 1:
            yield "accelerate_configs/fsdp2_shard_grad_op.yaml", sharded | {"reshard_after_forward": False}
        yield "accelerate_configs/fsdp2_full_shard.yaml", sharded | {"reshard_after_forward": True}
    elif not strategy.reshard_after_forward:
        key = "fsdp_reshard_after_forward: true" if strategy.kind == "fsdp2" else "fsdp_sharding_strategy: FULL_SHARD"
        yield key, {"reshard_after_forward": True}
    if strategy.is_fsdp and strategy.num_replicas > 1:
        yield "no parallelism_config (full shard over all ranks)", whole
    if strategy.num_processes > 1:
        yield from recomputing
    if not strategy.offload:
        yield "fsdp_offload_params: true", sharded | {"offload": True}


def estimate_peak(subject: Subject, strategy: Strategy, rows: int) -> int:
    """Peak bytes of one rank, extrapolated from models with few blocks; call within `fake_ranks`."""
    num_blocks = even_stack_length(subject.skeleton)
    if num_blocks is None or num_blocks <= FEW_BLOCKS[1]:
        return sum(trace_rank(subject, strategy, subject.skeleton, rows)[0].peak.values())
    totals = []
    for length in FEW_BLOCKS:
        trace, _ = trace_rank(subject, strategy, shortened(subject.skeleton, length), rows)
        totals.append([sum(peak.values()) for peak in trace.peaks])
    few, more = FEW_BLOCKS
    steps = (num_blocks - few) / (more - few)
    return int(max(low + (high - low) * steps for low, high in zip(*totals, strict=True)))


def even_stack_length(model: PreTrainedModel) -> int | None:
    """Number of blocks in each stack, if all stacks have equally many, alike from the second on; else None."""
    stacks = find_stacks(model)
    sizes = [{(p.shape, p.dtype, p.requires_grad) for p in block.parameters()} for stack in stacks for block in stack[1:]]
    lengths = {len(stack) for stack in stacks}
    each = len(sizes) // max(1, len(stacks))
    is_even = len(lengths) == 1 and all(size == sizes[place // each * each] for place, size in enumerate(sizes))
    return lengths.pop() if is_even else None


def shortened(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """A copy with only the first `length` blocks of each stack."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    chosen = [s for s in stacks if any(list(s) == stack for stack in find_stacks(model))]
    memo: dict[int, Any] = {id(stack): nn.ModuleList(copy.deepcopy(block) for block in stack[:length]) for stack in chosen}
    return copy.deepcopy(model, memo)
