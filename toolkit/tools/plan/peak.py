"""Peak memory of one rank in one micro-batch: traced on the full model, or extrapolated from models with few blocks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from toolkit.loss import summed_loss
from toolkit.optimizers import state_bytes
from toolkit.parallel.units import ShardUnit, local_tensor
from toolkit.parallel.wrap import ShardedModel, shard_model
from toolkit.tools.plan.strategy import Strategy, planned_accelerator
from toolkit.tools.plan.subject import Subject, build_batch, even_stack_length, find_stacks, num_micro_batches, shortened
from toolkit.tools.plan.trace import (
    GRADIENTS,
    SHARDED_PARAMETERS,
    UNSHARDED_GRADIENTS,
    Trace,
    fake_copy,
    first_shards,
    trace_micro_batch,
)
from toolkit.tools.private import FAKE_POINTER_READ, private, replaced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER = "optimizer state"
FEW_BLOCKS = (3, 5)
"""Stack lengths to extrapolate from; with fewer blocks, the first and the last prefetch each other."""


def trace_rank(subject: Subject, strategy: Strategy, skeleton: PreTrainedModel, rows: int) -> tuple[Trace, ShardedModel]:
    """The trace of one micro-batch of `rows`, with optimizer state, and the model it ran on; call within `fake_ranks`. A wrap
    class that is not in the model, or a weight that is tied across shard units, is a `UserError`."""
    accelerator = planned_accelerator(strategy)
    batch = build_batch(subject, rows)
    off_device = frozenset({SHARDED_PARAMETERS, GRADIENTS}) if strategy.offload else frozenset()
    vocab_size = subject.skeleton.config.get_text_config().vocab_size

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        is_autocast = not strategy.is_fsdp and strategy.compute_dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            return summed_loss(model, batch)[0]  # label smoothing has the same peak

    # transformers' own grouped products keep the same tensors as torch's, whose fake ones are in bf16 only.
    grouped = replaced("_can_use_grouped_mm", lambda *_: False)
    with warnings.catch_warnings(), private("FakeTensorMode")(allow_non_fake_inputs=True), grouped:
        warnings.filterwarnings("ignore", message=FAKE_POINTER_READ)
        # The sharded model; accumulated gradients exist if a step has several micro-batches.
        with first_shards():
            sharded = shard_model(accelerator, cast("PreTrainedModel", fake_copy(skeleton)), gpu_bytes=strategy.gpu_bytes or 0)
        if num_micro_batches(subject.config, strategy, rows) > 1:
            for parameter in sharded.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        fake_batch = {
            name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        stacks = find_stacks(sharded.plain)
        trace = trace_micro_batch(sharded.model, stacks, fake_batch, loss, vocab_size, off_device, strategy.is_cpu)
        num_trainable = sum(local_tensor(p).numel() for p in sharded.model.parameters() if p.requires_grad)
        optimizer_bytes = local_state_bytes(subject, sharded.model)
    # What the trace does not see.
    if strategy.kind == "fsdp1":
        _add_flat_gradients(trace, sharded.units, strategy)
    for peak in trace.peaks:
        peak[OPTIMIZER] = 0 if strategy.offload else optimizer_bytes
        if strategy.kind == "ddp" and strategy.num_processes > 1:
            peak[GRADIENTS] = num_trainable * 4  # views of DDP's buckets, which it allocates at the start
    return trace, sharded


def local_state_bytes(subject: Subject, model: nn.Module) -> int:
    """Bytes of the optimizer state on a rank, for its shards of the trainable parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(state_bytes(subject.config.optim.name, tuple(p.shape), tuple(local_tensor(p).shape)) for p in trained)


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


def _add_flat_gradients(trace: Trace, units: list[ShardUnit], strategy: Strategy) -> None:
    """FSDP1 has one flat gradient per unit, frozen parameters included: unsharded in the compute dtype, its shard in fp32."""
    frozen = [unit.num_parameters - unit.num_trainable for unit in units if unit.num_trainable]
    for peak in trace.peaks[trace.first_backward_phase :]:
        peak[UNSHARDED_GRADIENTS] += max(frozen, default=0) * strategy.compute_dtype.itemsize
        peak[GRADIENTS] += 0 if strategy.offload else sum(frozen) * 4 // strategy.num_shards
