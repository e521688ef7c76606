"""Reads what a watched run has left: its metrics, row ids and records; and the rows of the table that compare them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.files.json_lines import load_json_lines
from toolkit.tools.verify.runs import NUM_STEPS, WatchedRun
from toolkit.tracking.metrics_log import load_metrics

Tensors = dict[str, np.ndarray]


class NotReached(Exception):
    """A run ended before it wrote what a check needs."""

    def __init__(self, run: WatchedRun) -> None:
        super().__init__(run.title)
        self.run = run


def load_lines(run: WatchedRun, kind: str, *, needed: bool = True) -> list[dict[str, Any]]:
    """Lines of one kind in metrics.jsonl.

    Raises:
        NotReached: the lines are needed, and the last step is not among them.
    """
    path = run.folder / "metrics.jsonl"
    lines = [line for line in load_metrics(path) if line["kind"] == kind] if path.exists() else []
    if needed and (not lines or lines[-1]["step"] != NUM_STEPS):
        raise NotReached(run)
    return lines


def load_rows_of_steps(run: WatchedRun) -> dict[int, list[int]]:
    """Row ids by step, of all ranks and micro-batches, rank 0's first.

    Raises:
        NotReached: the last step is not among them.
    """
    steps: dict[int, list[int]] = {}
    for path in sorted(run.folder.glob("rows-*.jsonl")):
        for line in load_json_lines(path, skip_torn_end=True):
            steps.setdefault(line["step"], []).extend(line["row_ids"])
    if NUM_STEPS not in steps:
        raise NotReached(run)
    return steps


def load_tensors(run: WatchedRun, name: str) -> Tensors:
    """A record's unsharded tensors.

    Raises:
        NotReached: there is no such record.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(run.records / f"{name}.safetensors")
    except (OSError, SafetensorError):
        raise NotReached(run) from None


def load_list(run: WatchedRun, name: str) -> list[dict[str, Any]]:
    """The items that all ranks recorded, concatenated; empty if there were none.

    Raises:
        NotReached: the run ended before it wrote them.
    """
    return load_about(run, name) if run.failure or (run.records / f"{name}.json").is_file() else []


def load_about(run: WatchedRun, name: str) -> Any:
    """A record's JSON, which describes what the ranks hold.

    Raises:
        NotReached: there is no such record.
    """
    path = run.records / f"{name}.json"
    if not path.is_file():
        raise NotReached(run)
    return json.loads(path.read_text(encoding="utf-8"))


# --- Rows of the table.


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One row of the table."""

    check: str
    compared: str
    difference: float | None = None
    """Largest difference, in the unit of `tolerance`; None if nothing was measured."""
    tolerance: float = 0.0
    """0 means equal bit for bit."""
    passed: bool = False
    is_reached: bool = True
    """False if a run, or the one whose checkpoint it needs, ended before this check; another row has the reason."""
    detail: str = ""
    """The tensor or step that is wrong."""


def failed(check: str, compared: str, detail: str) -> Proof:
    """The row of a failure without a measured difference."""
    return Proof(check=check, compared=compared, detail=detail)


def prove(check: str, run: WatchedRun, work: Callable[[WatchedRun], Proof | None]) -> Proof | None:
    try:
        return work(run)
    except NotReached as missing:
        if missing.run.failure:
            return Proof(check=check, compared=run.title, is_reached=False)
        return failed(check, run.title, f"{missing.run.title} succeeded, but left no record to compare")


def exact(check: str, compared: str, difference: float, detail: str) -> Proof:
    """The row of a check that passes if nothing differs and there is no `detail`."""
    return Proof(check=check, compared=compared, difference=difference, passed=difference == 0 and not detail, detail=detail)


def within(check: str, compared: str, difference: float, where: Any, tolerance: float, detail: str) -> Proof:
    """The row of a check with a tolerance; if it fails, `where` is put into `detail`."""
    passed = difference <= tolerance  # False for a NaN
    reason = "" if passed else detail.format(where)
    return Proof(check=check, compared=compared, difference=difference, tolerance=tolerance, passed=passed, detail=reason)


def named(names: list[str], what: str) -> str:
    """The first name followed by `what`, and the number of further names."""
    return f"{names[0]} {what}" + (f", and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
