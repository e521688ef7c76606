"""Describes shard units, for the memory plan and for the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolkit.parallel.units import ShardUnit


def describe_units(units: Sequence[ShardUnit], **more: Callable[[ShardUnit], int]) -> list[dict[str, Any]]:
    """The kinds of units; equal ones share an entry. `more` gives further figures of a unit."""
    kinds: dict[tuple, list[ShardUnit]] = {}
    for unit in units:
        kinds.setdefault((unit.class_name, unit.num_parameters, unit.num_trainable, unit.dtypes), []).append(unit)
    return [
        {
            "unit": class_name if len(equal) > 1 else f"{class_name} {equal[0].name or '(the rest)'}",
            "count": len(equal),
            "num_parameters": num,
            "num_trainable": num_trainable,
            "dtypes": list(dtypes),
            "bytes_on_rank_0": sum(unit.local_bytes() for unit in equal),
            **{name: figure(equal[0]) for name, figure in more.items()},
        }
        for (class_name, num, num_trainable, dtypes), equal in kinds.items()
    ]
