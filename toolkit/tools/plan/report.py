"""Prints a memory plan as text or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import align, one_line
from toolkit.tools.plan.plan import MOST_ROWS, USABLE_SHARE, Plan, build_plan
from toolkit.tools.plan.trace import Bytes

GIB = 2**30
_UNIT_HEAD = ("shard unit", "count", "parameters", "dtype", "trainable", "all-gather MiB")


def show_plan(run_flags: list[str], *, accelerate_config: Path, config: str | None, as_json: bool, **options: Any) -> bool:
    """Build and print a run's memory plan, and return whether the run fits; arguments and errors of `plan.build_plan`."""
    run_arguments = [*([f"--config={config}"] if config else []), *run_flags]
    plan = build_plan(preset=accelerate_config, run_arguments=run_arguments, **options)
    print(json.dumps(plan_as_dict(plan), indent=2) if as_json else plan_as_text(plan))
    return plan.fits


def plan_as_text(plan: Plan) -> str:
    """The plan as tables, with the verdict last."""
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
        *align([_UNIT_HEAD, *map(_unit_cells, plan.units)], left=(0, 3)),
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


def _unit_cells(unit: dict[str, Any]) -> list[str]:
    num, mib = unit["num_parameters"], f"{unit['gather_bytes'] / 2**20:,.1f}"
    share = f"{unit['num_trainable'] / max(1, num):.2%}"
    return [unit["unit"], str(unit["count"]), f"{num:,}", "+".join(unit["dtypes"]), share, mib]


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
