"""Builds a memory plan: what a run needs on each rank, from running its own code on tensors without data.

FSDP2 is traced (`trace`). A single process and DDP are traced as the plain model, with DDP's buckets by
arithmetic. FSDP1 is derived from FSDP2's trace over the same units. Optimizer state, host memory and traffic are arithmetic.

The plan itself traces the full model; `search` tries other micro-batches and presets on models with few blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.distributed.device import GIB
from toolkit.errors import UserError, align, one_line
from toolkit.models.freeze import aliases
from toolkit.models.patches.documents import warn_of_full_rows
from toolkit.models.tensor_reader import PIECE_BYTES
from toolkit.optimizers import state_bytes
from toolkit.parallel.units import describe_units, find_towers, local_tensor
from toolkit.tools.plan.search import MOST_ROWS, find_change, largest_micro_batch, show_progress
from toolkit.tools.plan.strategy import Strategy, load_strategy, with_checkpointing
from toolkit.tools.plan.subject import (
    OPTIMIZER,
    Subject,
    build_subject,
    local_state_bytes,
    num_micro_batches,
    row_tokens,
    trace_rank,
)
from toolkit.tools.plan.trace import Bytes, Trace, fake_ranks

USABLE_SHARE = 0.92
"""Usable share of a GPU's memory. The CUDA context, NCCL's buffers and fragmentation take the rest. Not measured."""


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
    units: list[dict[str, Any]]
    """Of `describe_units`, with `gather_bytes` of each."""
    largest_gather_bytes: int
    tied: list[list[str]]
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
    """Build a run's memory plan; downloads only the model's config. `run_arguments` are `--config FILE` and dotted flags, as for
    a recipe; there may be none. If it `searches`, it looks for the largest micro-batch and for changes of the preset.
    `mixed_precision` replaces the preset's. Whatever the run itself would raise, and a mesh of another number of ranks, are a
    `UserError`."""
    if not 0 < gpu_memory_gib < float("inf"):
        raise UserError(f"--gpu-memory-gib is {gpu_memory_gib}: give a GPU's memory, as in 80")
    # What to plan for.
    strategy = load_strategy(preset, num_processes, gpu_memory_gib, mixed_precision)
    show_progress(f"building {model}")
    subject = build_subject(model, strategy, run_arguments, recipe)
    strategy = with_checkpointing(strategy, subject.config.train.activation_checkpointing)
    usable = int(gpu_memory_gib * 2**30 * USABLE_SHARE)
    rows = subject.config.train.micro_batch_size_rows
    # Trace the run, then search for the largest micro-batch and, if the run does not fit, a change of the preset.
    with fake_ranks(num_processes):
        show_progress("tracing a micro-batch of the full model")
        trace, sharded = trace_rank(subject, strategy, subject.skeleton, rows)
        largest = largest_micro_batch(subject, strategy, usable) if searches else None
        fits = sum(trace.peak.values()) <= usable
        change = find_change(subject, strategy, usable) if searches and not fits else None
    # The rest is arithmetic. A checkpoint has no frozen weights.
    num, itemsize = num_micro_batches(subject, strategy, rows), strategy.compute_dtype.itemsize
    trained, towers = [p for p in subject.skeleton.parameters() if p.requires_grad], find_towers(subject.skeleton)
    trainable_bytes = sum(p.nbytes for p in trained)
    return Plan(
        model=model,
        preset=str(preset),
        strategy=strategy,
        micro_batch_size_rows=rows,
        num_micro_batches=num,
        row_tokens=row_tokens(subject.config, subject.objective),
        device_bytes=trace.peak,
        host_bytes=_host_bytes(subject, strategy, sharded.model),
        checkpoint_bytes={
            "trainable parameters": trainable_bytes,
            OPTIMIZER: sum(state_bytes(subject.config.optim.name, tuple(p.shape)) for p in trained),
        },
        moved_bytes=_moved_bytes(strategy, trace, trainable_bytes, num),
        units=describe_units(
            sharded.units,
            gather_bytes=lambda unit: unit.gathered_bytes(itemsize) if strategy.is_fsdp and unit.name not in towers else 0,
        ),
        largest_gather_bytes=trace.largest_gather_bytes,
        tied=[names for names in aliases(subject.skeleton).values() if len(names) > 1],
        usable_bytes=usable,
        largest_micro_batch_rows=largest,
        change=change,
        notes=_notes(subject, strategy, largest),
    )


def _host_bytes(subject: Subject, strategy: Strategy, model: nn.Module) -> Bytes:
    """One rank's host memory: what loading needs besides the shards, what is offloaded, and the copy staged for a checkpoint."""
    trained = sum(local_tensor(p).nbytes for p in model.parameters() if p.requires_grad) + local_state_bytes(subject, model)
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
    num = num_micro_batches(subject, strategy, rows)
    fits = min(largest or 0, num * rows)
    # FSDP2 waits for each later micro-batch's gradients on the host, and adds them there (_fsdp_collectives.py:712).
    waits = (
        f"offload: gradients of {num} micro-batches are added on the host while the GPU waits; train.micro_batch_size_rows "
        f"{fits} fits too, and takes {num_micro_batches(subject, strategy, max(fits, rows))}"
    )
    dense = warn_of_full_rows(subject.skeleton, subject.why_dense) or ""
    first_pass = subject.objective.describe_first_pass(subject.config)
    halved = "; the weights of converted Linears are gathered in half the bytes" * strategy.is_fsdp
    notes = {
        waits: strategy.offload and num > 1 and fits > rows,
        "FSDP1: derived from a trace of FSDP2 over the same units, not traced itself": strategy.kind == "fsdp1",
        "processes on the CPU: its kernels, in the host's memory; the verdict takes each for a GPU": strategy.is_cpu,
        "DDP: derived, a trace of the plain model with gradients in DDP's buckets by arithmetic": strategy.kind == "ddp",
        "copies of weights in bf16 count as activations": not strategy.is_fsdp and strategy.compute_dtype.itemsize == 2,
        "flash or flex attention: planned as sdpa without a mask, whose kernels keep the same": subject.is_flash,
        dense: bool(dense),
        f"float8: planned as bf16{halved}": strategy.is_float8,
        "torch.compile: not planned; compiled blocks usually keep less": strategy.is_compiled,
        first_pass: bool(first_pass),
        "of training: an evaluation that generates, or with longer rows, may need more (eval.unshard)": True,
        "largest micro-batch and changes: extrapolated from models of few blocks": True,
    }
    return [note for note, applies in notes.items() if applies]


def show_plan(run_flags: list[str], *, accelerate_config: Path, config: str | None, as_json: bool, **options: Any) -> bool:
    """Build and print a run's memory plan, and return whether the run fits; arguments and errors of `plan.build_plan`."""
    run_arguments = [*([f"--config={config}"] if config else []), *run_flags]
    plan = build_plan(preset=accelerate_config, run_arguments=run_arguments, **options)
    print(json.dumps(plan_as_dict(plan), indent=2) if as_json else plan_as_text(plan))
    return plan.fits


def plan_as_text(plan: Plan) -> str:
    """The plan as tables, with the verdict last."""
    units = [["shard unit", "count", "parameters", "dtype", "trainable", "all-gather MiB"]]
    for unit in plan.units:
        num, mib = unit["num_parameters"], f"{unit['gather_bytes'] / 2**20:,.1f}"
        share = f"{unit['num_trainable'] / max(1, num):.2%}"
        units.append([unit["unit"], str(unit["count"]), f"{num:,}", "+".join(unit["dtypes"]), share, mib])
    tokens = ", ".join(f"{name} of {length} tokens" for name, length in plan.row_tokens.items())
    lines = [
        f"{plan.model}, {plan.preset}, {plan.strategy.num_processes} processes: {plan.strategy.num_shards} shards x "
        f"{plan.strategy.num_replicas} replicas",
        f"micro-batch of {plan.micro_batch_size_rows} rows ({tokens}), {plan.num_micro_batches} a step and rank",
        "",
        *_table("at the peak, GiB a rank", plan.device_bytes),
        "",
        *_table("host, GiB a rank", plan.host_bytes, with_total=False),
        "",
        *_table("checkpoint, GiB in all", plan.checkpoint_bytes),
        "",
        *_table("received, GiB a step and rank", plan.moved_bytes),
        "",
        *align(units, left=(0, 3)),
        f"largest all-gather: {plan.largest_gather_bytes / 2**20:,.1f} MiB",
        *(f"tied: {' = '.join(names)}" for names in plan.tied),
        *(f"note: {note}" for note in plan.notes),
        "",
        _verdict(plan),
    ]
    return "\n".join(map(one_line, lines))


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, in bytes."""
    own = {name: value for name, value in vars(plan).items() if name != "strategy"}
    strategy = {name: getattr(plan.strategy, name) for name in ("kind", "num_processes", "num_shards", "num_replicas")}
    return own | strategy | {"device_bytes_total": plan.total, "fits": plan.fits}


def _table(title: str, by_kind: Bytes, *, with_total: bool = True) -> list[str]:
    rows = {**by_kind, "total": sum(by_kind.values())} if with_total else by_kind
    return [title, *(f"  {kind:<36}{num_bytes / GIB:>10.2f}" for kind, num_bytes in rows.items())]


def _verdict(plan: Plan) -> str:
    need, usable = plan.total / GIB, plan.usable_bytes / GIB
    of = f"{need:.1f} of {usable:.1f} usable GiB ({USABLE_SHARE:.0%} of the GPU)"
    largest, rows = "", plan.largest_micro_batch_rows
    if rows is not None:
        how_many = f"{rows} row{'' if rows == 1 else 's'}{' or more' if rows == MOST_ROWS else ''}"
        largest = f"; the largest micro-batch that fits has {how_many}" if rows else "; no micro-batch fits"
    if plan.fits:
        return f"FITS: {of}{largest}"
    change = f"the cheapest change with which it fits: {plan.change}" if plan.change else "no change of the preset makes it fit"
    return f"DOES NOT FIT: {of}{largest}" + ("" if rows is None else f"; {change}")
