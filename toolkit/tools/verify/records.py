"""Reads what a watched run has left: the recipe's own metrics and row ids, and the records of `watched_run`."""

from __future__ import annotations

import json
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
