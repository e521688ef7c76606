"""Builds a memory plan: what a run needs on each rank, from running its own code on tensors without data.

FSDP2 is traced (`trace`). A single process and DDP are traced as the plain model under autocast, with DDP's buckets by
arithmetic. FSDP1 is derived from FSDP2's trace over the same units. Optimizer state, host memory and traffic are arithmetic.

The plan itself traces the full model. The searches for other micro-batches and presets trace two models with few blocks and
extrapolate: memory in every phase of a micro-batch grows linearly with the number of blocks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.errors import UserError, one_line
from toolkit.models.attention import warn_of_full_rows
from toolkit.models.freeze import aliases
from toolkit.models.tensor_reader import PIECE_BYTES
from toolkit.optimizers import state_bytes
from toolkit.parallel.units import describe_units, local_tensor
from toolkit.tools.plan.peak import OPTIMIZER, estimate_peak, local_state_bytes, trace_rank
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.plan.subject import Subject, build_subject, num_micro_batches, row_tokens
from toolkit.tools.plan.trace import Bytes, Trace, fake_ranks

USABLE_SHARE = 0.92
"""Usable share of a GPU's memory. The CUDA context, NCCL's buffers and fragmentation take the rest. Not measured."""
MOST_ROWS = 4096
"""Upper limit of the search for the largest micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory plan of a run, in bytes."""

    model: str
    preset: str
    strategy: Strategy
    micro_batch_size_rows: int
    num_micro_batches: int
    """Micro-batches of one step and rank; an upper bound if rows are packed."""
    row_tokens: dict[str, int]
    """Length of the longest row: `row`, or `source` and `target`."""
    device_bytes: Bytes
    """One rank's device memory at the peak, by kind."""
    host_bytes: Bytes
    checkpoint_bytes: Bytes
    moved_bytes: Bytes
    """Bytes that each rank receives in one step."""
    units: list[dict[str, Any]]
    """Of `describe_units`, with `gather_bytes` of each."""
    largest_gather_bytes: int
    tied: list[list[str]]
    """All names of each tied weight."""
    usable_bytes: int
    largest_micro_batch_rows: int | None
    """0: none fits; None: no search."""
    change: str | None
    """The cheapest change of the preset that makes the run fit; None if it fits already, or with no change."""
    notes: list[str]

    @property
    def total(self) -> int:
        """Peak bytes of one rank's device."""
        return sum(self.device_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the run fits the usable part of the GPU."""
        return self.total <= self.usable_bytes


def build_plan(
    model: str,
    preset: Path,
    num_processes: int,
    run_arguments: list[str],
    recipe: str | None,
    gpu_memory_gib: float,
    *,
    searches: bool = True,
    mixed_precision: str | None = None,
) -> Plan:
    """Build a run's memory plan; downloads only the model's config.

    Args:
        run_arguments: `--config FILE` and dotted flags, as for a recipe; may be empty.
        searches: search for the largest micro-batch and for changes of the preset.
        mixed_precision: replaces the preset's.

    Raises:
        UserError: whatever the run itself would raise, or the mesh has another number of ranks.
    """
    if not 0 < gpu_memory_gib < float("inf"):
        raise UserError(f"--gpu-memory-gib is {gpu_memory_gib}: give a GPU's memory, as in 80")
    # What to plan for.
    strategy = load_strategy(preset, num_processes, gpu_memory_gib, mixed_precision)
    _show_progress(f"building {model}")
    subject = build_subject(model, strategy, run_arguments, recipe)
    usable = int(gpu_memory_gib * 2**30 * USABLE_SHARE)
    rows = subject.config.train.micro_batch_size_rows
    # Trace the run, then search for the largest micro-batch and, if the run does not fit, a change of the preset.
    with fake_ranks(num_processes):
        _show_progress("tracing a micro-batch of the full model")
        trace, sharded = trace_rank(subject, strategy, subject.skeleton, rows)
        largest = largest_micro_batch(subject, strategy, usable) if searches else None
        fits = sum(trace.peak.values()) <= usable
        change = _find_change(subject, strategy, usable) if searches and not fits else None
    # The rest is arithmetic. A checkpoint has no frozen weights.
    num = num_micro_batches(subject.config, strategy, rows)
    trained = [p for p in subject.skeleton.parameters() if p.requires_grad]
    num_trainable = sum(p.numel() for p in trained)
    itemsize = strategy.compute_dtype.itemsize
    return Plan(
        model=model,
        preset=str(preset),
        strategy=strategy,
        micro_batch_size_rows=rows,
        num_micro_batches=num,
        row_tokens=row_tokens(subject.config),
        device_bytes=trace.peak,
        host_bytes=_host_bytes(subject, strategy, sharded.model),
        checkpoint_bytes={
            "trainable parameters": num_trainable * 4,
            OPTIMIZER: sum(state_bytes(subject.config.optim.name, tuple(p.shape)) for p in trained),
        },
        moved_bytes=_moved_bytes(strategy, trace, num_trainable * 4, num),
        units=describe_units(sharded.units, gather_bytes=lambda unit: unit.gathered_bytes(itemsize) if strategy.is_fsdp else 0),
        largest_gather_bytes=trace.largest_gather_bytes,
        tied=[names for names in aliases(subject.skeleton).values() if len(names) > 1],
        usable_bytes=usable,
        largest_micro_batch_rows=largest,
        change=change,
        notes=_notes(subject, strategy, largest),
    )


def _show_progress(doing: str) -> None:
    """A line on stderr: stdout has the result alone, which may be JSON."""
    print(one_line(f"planning: {doing}"), file=sys.stderr, flush=True)


def largest_micro_batch(subject: Subject, strategy: Strategy, usable: int) -> int:
    """Most rows of a micro-batch that fit in `usable` bytes: secant search with bisection bounds, as memory is near linear."""
    _show_progress("searching for the largest micro-batch that fits")
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


def _find_change(subject: Subject, strategy: Strategy, usable: int) -> str | None:
    """The first change with which the micro-batch fits; tries each alone, then each on top of those before it."""
    _show_progress("searching for a change of the preset with which it fits")
    changes = list(_changes(strategy))
    for chosen in [*([change] for change in changes), *(changes[:end] for end in range(2, len(changes) + 1))]:
        together = {key: value for _, change in chosen for key, value in change.items()}
        changed = dataclasses.replace(strategy, **together)
        if estimate_peak(subject, changed, subject.config.train.micro_batch_size_rows) <= usable:
            return " and ".join(text for text, _ in chosen)
    return None


def _changes(strategy: Strategy) -> Iterable[tuple[str, dict[str, Any]]]:
    """Changes of a preset that save memory, the cheapest in time first."""
    whole: dict[str, Any] = {"num_shards": strategy.num_processes, "num_replicas": 1}
    sharded = {} if strategy.is_fsdp else whole | {"kind": "fsdp2"}
    if not strategy.is_fsdp:
        if strategy.num_processes > 1:
            yield "accelerate_configs/fsdp2_shard_grad_op.yaml", sharded | {"reshard_after_forward": False}
        yield "accelerate_configs/fsdp2_full_shard.yaml", sharded | {"reshard_after_forward": True}
    elif not strategy.reshard_after_forward:
        key = "fsdp_reshard_after_forward: true" if strategy.kind == "fsdp2" else "fsdp_sharding_strategy: FULL_SHARD"
        yield key, {"reshard_after_forward": True}
    if strategy.is_fsdp and strategy.num_replicas > 1:
        yield "no parallelism_config (full shard over all ranks)", whole
    if not strategy.activation_checkpointing:
        yield "fsdp_activation_checkpointing: true", sharded | {"activation_checkpointing": True}
    if not strategy.offload:
        yield "fsdp_offload_params: true", sharded | {"offload": True}


def _host_bytes(subject: Subject, strategy: Strategy, model: nn.Module) -> Bytes:
    """One rank's host memory: what loading needs besides the shards, what is offloaded, and the copy staged for a checkpoint."""
    num_trainable = sum(local_tensor(p).numel() for p in model.parameters() if p.requires_grad)
    trained = num_trainable * 4 + local_state_bytes(subject, model)
    quantizes = subject.config.adapter.base_dtype is not None
    loads_parts = strategy.kind != "fsdp1" and not subject.config.model.from_scratch
    # A piece as stored and as converted, and what quantizes it (benchmarks/memory/quantized_base.py); otherwise the full model.
    loaded = (12 if quantizes else 2) * PIECE_BYTES if loads_parts else sum(p.nbytes for p in subject.skeleton.parameters())
    shards = sum(local_tensor(p).nbytes for p in model.parameters())
    return {
        "while loading": loaded,
        "offloaded shards": shards + trained if strategy.offload else 0,
        "copy for an asynchronous save": trained if subject.config.checkpoint.async_save else 0,
    }


def _moved_bytes(strategy: Strategy, trace: Trace, trainable_bytes: int, num: int) -> Bytes:
    """Bytes that each rank receives in a step of `num` micro-batches, assuming ring algorithms."""
    shards, replicas = strategy.num_shards, strategy.num_replicas
    # FSDP2 reduces between replicas once a step, and gathers once what stays gathered (`wrap.accumulating`).
    times_reduced = 1 if strategy.kind == "fsdp2" and not strategy.offload else num
    times_gathered = 1 if strategy.kind == "fsdp2" and not strategy.reshard_after_forward else num
    between = trace.reduced_bytes * times_reduced if strategy.is_fsdp else trainable_bytes
    reduced = trace.reduced_bytes if strategy.is_fsdp else trainable_bytes
    return {
        "all-gather": trace.gathered_bytes * times_gathered * (shards - 1) // shards,
        "reduce-scatter": reduced * num * (shards - 1) // shards,
        "all-reduce": 2 * between // shards * (replicas - 1) // replicas,
    }


def _notes(subject: Subject, strategy: Strategy, largest: int | None) -> list[str]:
    """What would be faster, and where the plan differs from a trace of the real run."""
    rows = subject.config.train.micro_batch_size_rows
    num = num_micro_batches(subject.config, strategy, rows)
    fits = min(largest or 0, num * rows)
    # FSDP2 waits for each later micro-batch's gradients on the host, and adds them there (_fsdp_collectives.py:712).
    waits = (
        f"offload: gradients of {num} micro-batches are added on the host while the GPU waits; train.micro_batch_size_rows "
        f"{fits} fits too, and takes {num_micro_batches(subject.config, strategy, max(fits, rows))}"
    )
    autocast = f"traced under autocast{'' if strategy.is_cpu else ', as the CPU has it'}; casts of weights count as activations"
    dense = warn_of_full_rows(subject.skeleton, subject.why_dense) or ""
    notes = {
        waits: strategy.offload and num > 1 and fits > rows,
        "FSDP1: derived from a trace of FSDP2 over the same units, not traced itself": strategy.kind == "fsdp1",
        "processes on the CPU: its kernels, in the host's memory; the verdict takes each for a GPU": strategy.is_cpu,
        "DDP: derived, a trace of the plain model with gradients in DDP's buckets by arithmetic": strategy.kind == "ddp",
        autocast: not strategy.is_fsdp,
        "flash or flex attention: planned as sdpa without a mask, whose kernels keep the same": subject.is_flash,
        dense: bool(dense),
        "float8: planned as bf16; the weights of converted Linears are gathered in half the bytes": strategy.is_float8,
        "torch.compile: not planned; compiled blocks usually keep less": strategy.is_compiled,
        "of training: an evaluation that generates, or with longer rows, may need more (eval.unshard)": True,
        "largest micro-batch and changes: extrapolated from models of few blocks": True,
    }
    return [note for note, applies in notes.items() if applies]
