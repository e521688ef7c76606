"""What the runs have left is held against each other: each check gives rows of the table, passed or FAILED."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.tracking import load_metrics
from toolkit.verification.runs import NUM_STEPS, SAVED_STEP, WatchedRun

GRADIENT_FLOOR = 0.01
"""A gradient that is zero but for rounding (of an attention key's bias) is compared with this share of the model's mean one."""
SHARD_SLACK = 0.01
"""Padding that FSDP may add to a rank's share."""

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One row of the table."""

    check: str
    compared: str
    difference: float | None
    """Largest one found, in what `tolerance` is given in; None where there was nothing to measure."""
    tolerance: float
    """0: equal bit for bit."""
    passed: bool
    detail: str = ""
    """Which tensor or step, or why it could not be compared."""


class NotReached(Exception):
    """A run has ended before it left what a check needs."""


def check_all(runs: dict[str, WatchedRun], tolerance: float) -> list[Proof]:
    """Every check but the exports', in the order of a run. A run that is not there, or ended early, fails what needs it."""
    reference, main = runs["reference"], runs["preset-0"]
    strategies = [run for name, run in runs.items() if name in ("reference", "ddp") or name.startswith("preset-")]
    resharded, dropout, resumed = runs["resharded"], runs["dropout"], runs["resumed"]
    others = strategies[1:]
    with_curves = [*others, resharded]
    proofs = [_prove("rows", run, lambda run: compare_rows(reference, run)) for run in with_curves]
    proofs += [_prove("loss", run, lambda run: compare_losses(reference, run, tolerance)) for run in with_curves]
    proofs += [_prove("gradients", run, lambda run: compare_gradients(reference, run, tolerance)) for run in others]
    proofs += [_prove("evaluation", run, lambda run: compare_evaluations(reference, run, tolerance)) for run in with_curves]
    proofs += [_prove("sharding", run, check_shards) for run in others if run.plan.num_shards]
    proofs += [_prove("ties", run, check_ties) for run in strategies]
    proofs += [_prove("moved", run, check_moved) for run in strategies]
    proofs += [_prove("frozen", run, check_frozen) for run in strategies]
    proofs.append(_prove("save", resharded, lambda run: compare_loaded(main, run)))
    proofs.append(_prove("save", resumed, lambda run: compare_loaded(dropout, run)))
    proofs.append(_prove("resume", resumed, lambda run: compare_resumed(dropout, run)))
    return [proof for proof in proofs if proof is not None]


def not_reached(check: str, run: WatchedRun, reason: str) -> Proof:
    """The row of a check that a run did not live to see."""
    return Proof(check=check, compared=run.title, difference=None, tolerance=0.0, passed=False, detail=reason)


def _prove(check: str, run: WatchedRun, work: Callable[[WatchedRun], Proof | None]) -> Proof | None:
    try:
        return work(run)
    except NotReached as reason:
        return not_reached(check, run, str(reason))


# --- Equal over processes, micro-batches and presets.


def compare_rows(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Every step takes the same rows, none of them twice."""
    expected, actual = _rows_of_steps(reference), _rows_of_steps(run)
    wrong = [step for step, rows in actual.items() if sorted(rows) != sorted(expected.get(step, []))]
    detail = f"step {wrong[0]} takes other rows, or some twice" if wrong else ""
    return _exact("rows", f"{run.title}: rows of {len(actual)} steps", len(wrong), detail)


def compare_losses(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof:
    """The loss of every step."""
    expected = {line["step"]: line["loss"] for line in _lines(reference, "train")}
    lines = _lines(run, "train")
    worst = max((_relative(line["loss"], expected[line["step"]]), line["step"]) for line in lines)
    return _within("loss", f"{run.title}: {len(lines)} steps", *worst, tolerance, "step {}")


def compare_gradients(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof:
    """Whole gradients of step 1 before clipping, each by its norm; and the global norm of every step."""
    expected, actual = _tensors(reference, "gradients"), _tensors(run, "gradients")
    if expected.keys() != actual.keys():
        names = sorted(expected.keys() ^ actual.keys())
        detail = f"{names[0]} has a gradient on one side only"
        return Proof(check="gradients", compared=run.title, difference=None, tolerance=tolerance, passed=False, detail=detail)
    squares = sum(float(np.square(g, dtype=np.float64).sum()) for g in expected.values())
    mean = math.sqrt(squares / max(1, sum(g.size for g in expected.values())))

    def difference(name: str) -> float:
        floor = GRADIENT_FLOOR * mean * math.sqrt(expected[name].size)
        whole = max(float(np.linalg.norm(expected[name])), floor, 1e-30)
        return _number(float(np.linalg.norm(actual[name] - expected[name])) / whole)

    worst = max((difference(name), name) for name in expected)
    norms = {line["step"]: line["grad_norm"] for line in _lines(reference, "train")}
    for line in _lines(run, "train"):
        worst = max(worst, (_relative(line["grad_norm"], norms[line["step"]]), f"the norm of step {line['step']}"))
    return _within("gradients", f"{run.title}: {len(expected)} tensors, {NUM_STEPS} norms", *worst, tolerance, "{}")


def compare_evaluations(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof | None:
    """The held-out loss after the last step; None where there are no held-out rows."""
    expected, actual = _lines(reference, "eval", needed=False), _lines(run, "eval", needed=False)
    if not expected:
        return None
    if not actual:
        raise NotReached(_why(run))
    difference = _relative(actual[-1]["loss"], expected[-1]["loss"])
    title = f"{run.title}: {expected[-1]['num_rows']} held-out rows"
    return _within("evaluation", title, difference, "", tolerance, "held-out loss{}")


# --- What each rank holds.


def check_shards(run: WatchedRun) -> Proof:
    """No rank holds more of the parameters than its shard, nor ranks on average more of the moments: a silent DDP holds all.

    FSDP1 cuts trainable and frozen parameters as one, so that a rank alone may hold most of the trainable ones.
    """
    about, num_shards = _about(run, f"saved-{SAVED_STEP}"), run.plan.num_shards or 1
    whole = fair = trainable = 0
    for parameter in about["parameters"].values():
        first, *rest = parameter["shape"] or [1]
        row_bytes = math.prod(rest) * parameter["itemsize"]
        whole, fair = whole + first * row_bytes, fair + -(-first // num_shards) * row_bytes
        trainable += first * row_bytes * parameter["is_trainable"]
    of_ranks = {kind: [rank[f"{kind}_bytes"] for rank in about["ranks"]] for kind in ("parameter", "moment")}
    shares = {
        "parameters": (max(of_ranks["parameter"]) / whole, fair / whole),
        "moments": (sum(of_ranks["moment"]) / len(about["ranks"]) / (2 * trainable), fair / whole),
    }
    name, (share, limit) = max(shares.items(), key=lambda item: item[1][0] - item[1][1])
    where = ", ".join(about["placements"])
    title = f"{run.title}: largest share of a rank" + (f", {where}" if where else "")
    return _within("sharding", title, share, f"a rank holds {share:.0%} of the {name}", limit + SHARD_SLACK, "{}")


def check_ties(run: WatchedRun) -> Proof | None:
    """Names that are one weight in transformers' own model are one in the wrapped one; None where nothing is tied."""
    ties = _about(run, "loaded")["ties"]
    if not ties["tied"]:
        return None
    broken = [" = ".join(names) for names in ties["broken"]]
    num_names = sum(map(len, ties["tied"]))
    return _exact("ties", f"{run.title}: {num_names} names of {len(ties['tied'])} weights", len(broken), "; ".join(broken))


def check_moved(run: WatchedRun) -> Proof:
    """Every trainable parameter differs from the start."""
    before, after = _tensors(run, "loaded"), _tensors(run, "trained")
    names = [name for name in before if name.startswith("model.")]
    still = [name for name in names if before[name].tobytes() == after[name].tobytes()]
    return _exact("moved", f"{run.title}: {len(names)} trainable tensors", len(still), named(still, "has not moved"))


def check_frozen(run: WatchedRun) -> Proof | None:
    """Every frozen parameter is bit for bit what it was at the start; None where nothing is frozen."""
    before, after = _about(run, "loaded")["frozen"], _about(run, "trained")["frozen"]
    if not before:
        return None
    changed = [name for name in before if after.get(name) != before[name]]
    return _exact("frozen", f"{run.title}: {len(before)} frozen tensors", len(changed), named(changed, "has changed"))


# --- Checkpoints.


def compare_loaded(of: WatchedRun, run: WatchedRun) -> Proof:
    """What a run has after loading a checkpoint is what the run that saved it had: weights and moments, bit for bit."""
    title = f"{of.title}, loaded by {run.plan.mapping['num_processes']}"
    return _same_tensors("save", title, _tensors(of, f"saved-{SAVED_STEP}"), _tensors(run, "loaded"))


def compare_resumed(whole: WatchedRun, resumed: WatchedRun) -> Proof:
    """With dropout on: rows, losses, gradient norms, learning rates, and at the end weights and moments are bit for bit those of
    the run that was not stopped."""
    after = [line for line in _lines(whole, "train") if line["step"] > SAVED_STEP]
    lines = _lines(resumed, "train")
    title = f"{resumed.title} after step {SAVED_STEP}: curves, weights, moments"
    for expected, line in zip(after, lines, strict=True):
        for figure in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
            if line[figure] != expected[figure]:
                difference = _relative(line[figure], expected[figure])
                return _exact("resume", title, difference, f"{figure} of step {expected['step']} differs")
    rows = _rows_of_steps(whole)
    if wrong := [step for step, of_step in _rows_of_steps(resumed).items() if of_step != rows[step]]:
        return _exact("resume", title, 1.0, f"step {wrong[0]} takes other rows")
    return _same_tensors("resume", title, _tensors(whole, f"saved-{NUM_STEPS}"), _tensors(resumed, f"saved-{NUM_STEPS}"))


def _same_tensors(check: str, title: str, expected: Tensors, actual: Tensors) -> Proof:
    if expected.keys() != actual.keys():
        return _exact(check, title, math.inf, f"{sorted(expected.keys() ^ actual.keys())[0]} is on one side only")
    unequal = {
        name: _number(float(np.abs(actual[name] - expected[name]).max()))
        for name in expected
        if expected[name].tobytes() != actual[name].tobytes()
    }
    compared = f"{title}, {len(expected)} tensors" if check == "save" else title
    return _exact(check, compared, max(unequal.values(), default=0.0), named(sorted(unequal), "differs"))


# --- Rows of the table.


def _exact(check: str, compared: str, difference: float, detail: str) -> Proof:
    passed = difference == 0 and not detail
    return Proof(check=check, compared=compared, difference=difference, tolerance=0.0, passed=passed, detail=detail)


def _within(check: str, compared: str, difference: float, where: Any, tolerance: float, detail: str) -> Proof:
    passed = difference <= tolerance  # False of a NaN
    told = "" if passed else detail.format(where)
    return Proof(check=check, compared=compared, difference=difference, tolerance=tolerance, passed=passed, detail=told)


def _relative(actual: float, expected: float) -> float:
    return _number(abs(actual - expected) / max(abs(expected), 1e-30))


def _number(difference: float) -> float:
    """NaN is the largest difference of all."""
    return math.inf if math.isnan(difference) else difference


def named(names: list[str], what: str) -> str:
    """The first of the names, with what is said of it, and how many more there are."""
    return f"{names[0]} {what}" + (f", and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


# --- What runs have left.


def _why(run: WatchedRun) -> str:
    return run.failure or f"{run.title} has not left what is compared"


def _lines(run: WatchedRun, kind: str, *, needed: bool = True) -> list[dict[str, Any]]:
    path = run.folder / "metrics.jsonl"
    lines = [line for line in load_metrics(path) if line["kind"] == kind] if path.exists() else []
    if needed and (not lines or lines[-1]["step"] != NUM_STEPS):
        raise NotReached(_why(run))
    return lines


def _rows_of_steps(run: WatchedRun) -> dict[int, list[int]]:
    """Row ids by step: of all ranks and micro-batches, rank 0's first."""
    steps: dict[int, list[int]] = {}
    for path in sorted(run.folder.glob("rows-*.jsonl")):
        for line in _json_lines(path):
            steps.setdefault(line["step"], []).extend(line["row_ids"])
    if NUM_STEPS not in steps:
        raise NotReached(_why(run))
    return steps


def _json_lines(path: Path) -> Iterable[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _tensors(run: WatchedRun, name: str) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(run.records / f"{name}.safetensors")
    except (OSError, SafetensorError):
        raise NotReached(_why(run)) from None


def _about(run: WatchedRun, name: str) -> dict[str, Any]:
    path = run.records / f"{name}.json"
    if not path.is_file():
        raise NotReached(_why(run))
    return json.loads(path.read_text(encoding="utf-8"))
