"""Compares the records of the runs. Each check gives rows of the table, passed or FAILED."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from toolkit.tools.verify.records import (
    NotReached,
    Proof,
    Tensors,
    exact,
    failed,
    load_about,
    load_lines,
    load_rows_of_steps,
    load_tensors,
    named,
    prove,
    within,
)
from toolkit.tools.verify.runs import NUM_STEPS, SAVED_STEP, WatchedRun

GRADIENT_FLOOR = 0.01
"""A gradient that is zero up to rounding (an attention key's bias) is compared with this fraction of the model's mean one."""
LATE_TOLERANCE = 0.01
"""Tolerance for gradients in step 2: if one of step 1 is zero up to rounding, Adam may move that weight either way."""
RELU_TOLERANCE = 0.01
"""Least tolerance for gradients of a model with ReLUs: a unit whose input is zero up to rounding may be open in one run only.

One such unit of 512, in a T5 of 900,000 parameters, changed its layer's gradient by 1.4e-3 and the global norm by 3.5e-5.
"""
BF16_TOLERANCE = 0.05
"""Largest relative difference of a loss or gradient norm in bf16 from that in fp32; a number in bf16 is off by up to 0.4 %."""
SHARD_SLACK = 0.01
"""Padding that FSDP may add to a rank's share, as a fraction."""


def check_all(runs: dict[str, WatchedRun], tolerance: float, *, expects_frozen: bool) -> list[Proof]:
    """All checks except those of updates and exports. A run that ended early fails one check and leaves others not reached.

    Args:
        runs: by name, as in `runs.plan_runs`.
        tolerance: largest relative difference of losses and gradients.
        expects_frozen: whether the config freezes anything.
    """
    reference, main, resharded = runs["reference"], runs["preset-0"], runs["resharded"]
    dropout, resumed = runs["dropout"], runs["resumed"]
    others = [run for name, run in runs.items() if name == "ddp" or name.startswith("preset-")]
    strategies, with_curves = [reference, *others], [*others, resharded]
    proofs = [prove("start", run, lambda run: compare_starts(reference, run)) for run in others]
    proofs += [prove("rows", run, lambda run: compare_rows(reference, run)) for run in with_curves]
    proofs += [prove("loss", run, lambda run: compare_losses(reference, run, tolerance)) for run in with_curves]
    proofs += [prove("gradients", run, lambda run: compare_gradients(reference, run, tolerance)) for run in others]
    proofs += [prove("gradients", run, lambda run: compare_late_gradients(reference, run)) for run in others]
    proofs += [prove("evaluation", run, lambda run: compare_evaluations(reference, run, tolerance)) for run in with_curves]
    for name, kept in runs.items():
        if name.startswith("kept-"):
            recomputed = runs.get(name.replace("kept", "recomputed"), dropout)
            proofs.append(prove("recomputation", recomputed, partial(compare_recomputed, kept, tolerance=tolerance)))
    if bf16 := runs.get("bf16"):
        proofs.append(prove("bf16", bf16, lambda run: compare_bf16(reference, run)))
    proofs += [prove("sharding", run, check_shards) for run in others if run.plan.num_shards]
    proofs += [prove("ties", run, check_ties) for run in (*strategies, resharded, resumed)]
    proofs += [prove("moved", run, check_moved) for run in strategies]
    proofs += [prove("frozen", run, lambda run: check_frozen(run, expects_frozen)) for run in strategies]
    proofs.append(prove("save", resharded, lambda run: compare_loaded(main, run)))
    proofs.append(prove("save", resumed, lambda run: compare_loaded(dropout, run)))
    proofs.append(prove("resume", resumed, lambda run: compare_resumed(dropout, run, without_dropout=main)))
    ended_early = [
        failed(run.failed_check, run.title, run.failure or "") for run in runs.values() if run.failed_check is not None
    ]
    return [*(proof for proof in proofs if proof is not None), *ended_early]


# --- What must be equal for all processes, micro-batches and presets.


def compare_starts(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Check that the weights before the first step, trainable and frozen, are bit for bit those that one process loads."""
    expected, actual = load_about(reference, "loaded")["frozen"], load_about(run, "loaded")["frozen"]
    title = f"{run.title}: weights as loaded"
    if changed := [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]:
        return failed("start", title, named(changed, "is not what one process loads"))
    return _same_tensors("start", title, load_tensors(reference, "loaded"), load_tensors(run, "loaded"))


def compare_rows(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Check that every step takes the same rows, and none twice."""
    expected, actual = load_rows_of_steps(reference), load_rows_of_steps(run)
    wrong = [step for step, rows in actual.items() if sorted(rows) != sorted(expected.get(step, []))]
    detail = f"step {wrong[0]} takes other rows, or some twice" if wrong else ""
    return exact("rows", f"{run.title}: rows of {len(actual)} steps", len(wrong), detail)


def compare_losses(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof:
    """Compare the loss of every step."""
    expected = {line["step"]: line["loss"] for line in load_lines(reference, "train")}
    lines = load_lines(run, "train")
    worst = max((_relative(line["loss"], expected[line["step"]]), line["step"]) for line in lines)
    return within("loss", f"{run.title}: {len(lines)} steps", *worst, tolerance, "that of step {}")


def compare_gradients(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof:
    """Compare the unsharded gradients of step 1 before clipping, relative to their norms, and the global norm of every step."""
    expected, actual = load_tensors(reference, "gradients"), load_tensors(run, "gradients")
    if expected.keys() != actual.keys():
        return failed("gradients", run.title, f"{min(expected.keys() ^ actual.keys())} has a gradient on one side only")
    worst = _largest_gradient(expected, actual)
    norms = {line["step"]: line["grad_norm"] for line in load_lines(reference, "train")}
    for line in load_lines(run, "train"):
        worst = max(worst, (_relative(line["grad_norm"], norms[line["step"]]), f"the norm of step {line['step']}"))
    title = f"{run.title}: {len(expected)} tensors, {NUM_STEPS} norms"
    if load_about(reference, "loaded")["has_relu"]:
        title, tolerance = f"{title} (with ReLU)", max(tolerance, RELU_TOLERANCE)
    return within("gradients", title, *worst, tolerance, "largest in {}")


def compare_recomputed(kept: WatchedRun, run: WatchedRun, tolerance: float) -> Proof:
    """Compare gradients with dropout of a run that recomputes activations with those of one that keeps them, from equal seeds."""
    proof = compare_gradients(kept, run, tolerance)
    return replace(proof, check="recomputation", compared=f"{proof.compared}, with activations kept")


def compare_late_gradients(reference: WatchedRun, run: WatchedRun) -> Proof | None:
    """Compare the unsharded gradients of step 2 whose step 1 was zero, as LoRA's A while B is zero; None if there are none."""
    zero = {name for name, gradient in load_tensors(reference, "gradients").items() if not gradient.any()}
    if not zero:
        return None
    expected, actual = (
        {name: gradient for name, gradient in load_tensors(of, "late_gradients").items() if name in zero}
        for of in (reference, run)
    )
    if expected.keys() != actual.keys():
        return failed("gradients", run.title, f"{min(expected.keys() ^ actual.keys())} has a gradient in step 2 on one side only")
    title = f"{run.title}: {len(expected)} tensors that are zero in step 1, in step 2"
    return within("gradients", title, *_largest_gradient(expected, actual), LATE_TOLERANCE, "largest in {}")


def _largest_gradient(expected: Tensors, actual: Tensors) -> tuple[float, str]:
    """The largest difference of two sets of gradients, relative to their norms, and the parameter's name."""
    squares = sum(float(np.square(g, dtype=np.float64).sum()) for g in expected.values())
    mean = math.sqrt(squares / max(1, sum(g.size for g in expected.values())))

    def difference(name: str) -> float:
        floor = GRADIENT_FLOOR * mean * math.sqrt(expected[name].size)
        if actual[name].shape != expected[name].shape:
            return math.inf
        whole = max(float(np.linalg.norm(expected[name])), floor, 1e-30)
        return _number(float(np.linalg.norm(actual[name] - expected[name])) / whole)

    return max((difference(name), name) for name in expected)


def compare_evaluations(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof | None:
    """Compare the evaluation loss after the last step; None without evaluation rows."""
    expected, actual = load_lines(reference, "eval", needed=False), load_lines(run, "eval", needed=False)
    if not expected:
        return None
    if not actual:
        raise NotReached(run)
    difference = _relative(actual[-1]["loss"], expected[-1]["loss"])
    title = f"{run.title}: {expected[-1]['num_rows']} evaluation rows"
    return within("evaluation", title, difference, "", tolerance, "the evaluation loss differs{}")


def compare_bf16(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Compare loss and gradient norm of every step, computed in bf16, with those in fp32."""
    expected = {line["step"]: line for line in load_lines(reference, "train")}
    differences = [
        (_relative(line[figure], expected[line["step"]][figure]), f"{figure} of step {line['step']}")
        for line in load_lines(run, "train")
        for figure in ("loss", "grad_norm")
    ]
    title = f"{run.title}: losses and norms of {NUM_STEPS} steps, fp32"
    return within("bf16", title, *max(differences), BF16_TOLERANCE, "largest in {}")


# --- What each rank holds.


def check_shards(run: WatchedRun) -> Proof:
    """Check that no rank holds more of the parameters than its shard, nor ranks on average more of the moments, as under DDP.

    Moments are averaged because FSDP1 shards trainable and frozen parameters together: one rank may hold most of the former.
    """
    about, num_shards = load_about(run, f"saved-{SAVED_STEP}"), run.plan.num_shards or 1
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
    return within("sharding", title, share, f"a rank holds {share:.0%} of the {name}", limit + SHARD_SLACK, "{}")


def check_ties(run: WatchedRun) -> Proof | None:
    """Check that weights tied in transformers' own model are tied in the wrapped one; None if nothing is tied."""
    ties = load_about(run, "loaded")["ties"]
    if not ties["tied"]:
        return None
    broken = [" = ".join(names) for names in ties["broken"]]
    num_names = sum(map(len, ties["tied"]))
    title = f"{run.title}: {num_names} names in {len(ties['tied'])} group(s)"
    return exact("ties", title, len(broken), f"no longer one weight: {'; '.join(broken)}" if broken else "")


def check_moved(run: WatchedRun) -> Proof:
    """Check that every trainable parameter has changed since the start."""
    before, after = load_tensors(run, "loaded"), load_tensors(run, "trained")
    names = [name for name in before if name.startswith("model.")]
    still = [name for name in names if before[name].tobytes() == after[name].tobytes()]
    return exact("moved", f"{run.title}: {len(names)} trainable tensors", len(still), named(still, "has not moved"))


def check_frozen(run: WatchedRun, expects_frozen: bool) -> Proof | None:
    """Check that every frozen parameter is bit for bit unchanged; None if nothing is frozen, and nothing should be."""
    before, after = load_about(run, "loaded")["frozen"], load_about(run, "trained")["frozen"]
    if not before:
        return failed("frozen", run.title, "nothing is frozen") if expects_frozen else None
    changed = [name for name in before if after.get(name) != before[name]]
    return exact("frozen", f"{run.title}: {len(before)} frozen tensors", len(changed), named(changed, "has changed"))


# --- Checkpoints.


def compare_loaded(of: WatchedRun, run: WatchedRun) -> Proof:
    """Check that a run loads a checkpoint's weights and moments bit for bit as they were saved."""
    title = f"{of.title}, loaded by {run.plan.mapping['num_processes']}"
    return _same_tensors("save", title, load_tensors(of, f"saved-{SAVED_STEP}"), load_tensors(run, "loaded"))


def compare_resumed(whole: WatchedRun, resumed: WatchedRun, without_dropout: WatchedRun) -> Proof:
    """Check that a resumed run with dropout is bit for bit the uninterrupted one: rows, losses, gradient norms, learning rates,
    final weights and moments. In a model without dropout this does not test the random state."""
    # The logged figures, then the rows, then weights and moments.
    after = [line for line in load_lines(whole, "train") if line["step"] > SAVED_STEP]
    lines = load_lines(resumed, "train")
    title = f"{resumed.title} after step {SAVED_STEP}: curves, weights, moments"
    if not without_dropout.failure and load_lines(without_dropout, "train")[0]["loss"] == load_lines(whole, "train")[0]["loss"]:
        title += " (dropout changes nothing in this model)"
    if len(lines) != len(after):
        return failed("resume", title, f"steps {[line['step'] for line in lines]} were logged")
    for expected, line in zip(after, lines, strict=True):
        for figure in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
            if line[figure] != expected[figure]:
                difference = _relative(line[figure], expected[figure])
                return exact("resume", title, difference, f"{figure} of step {expected['step']} differs")
    rows = load_rows_of_steps(whole)
    if wrong := [step for step, of_step in load_rows_of_steps(resumed).items() if of_step != rows[step]]:
        return exact("resume", title, 1.0, f"step {wrong[0]} takes other rows")
    return _same_tensors("resume", title, load_tensors(whole, f"saved-{NUM_STEPS}"), load_tensors(resumed, f"saved-{NUM_STEPS}"))


def _same_tensors(check: str, title: str, expected: Tensors, actual: Tensors) -> Proof:
    if expected.keys() != actual.keys():
        return exact(check, title, math.inf, f"{sorted(expected.keys() ^ actual.keys())[0]} is on one side only")
    unequal = {name: _largest(actual[name], t) for name, t in expected.items() if t.tobytes() != actual[name].tobytes()}
    compared = f"{title}, {len(expected)} tensors" if check == "save" else title
    return exact(check, compared, max(unequal.values(), default=0.0), named(sorted(unequal), "differs"))


# --- Differences.


def _relative(actual: float | None, expected: float | None) -> float:
    """Relative difference of two figures in metrics.jsonl, which has null for a value that was not finite."""
    if actual is None or expected is None:
        return math.inf
    return _number(abs(actual - expected) / max(abs(expected), 1e-30))


def _largest(actual: np.ndarray, expected: np.ndarray) -> float:
    return _number(float(np.abs(actual - expected).max())) if actual.shape == expected.shape else math.inf


def _number(difference: float) -> float:
    """The difference, or infinity for NaN."""
    return math.inf if math.isnan(difference) else difference
