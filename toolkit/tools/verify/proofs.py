"""The rows of the table, and the differences that they show. Checks of steps on their own, without another run: the optimizer
against its formula, and dropout masks that must differ."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from safetensors import SafetensorError

from toolkit.config.schema import OptimConfig
from toolkit.optimizers import OPTIMIZERS
from toolkit.tools.verify import PROBED_STEPS
from toolkit.tools.verify.runs import LARGEST_GRAD_NORM, SAVED_STEP, NotReached, Tensors, WatchedRun

UPDATE_TOLERANCE = 1e-4
"""Tolerance for moments and for a weight's change, relative to their norms and beyond the weight's last bits."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One row of the table."""

    check: str = ""
    """Set by `prove`."""
    compared: str
    difference: float | None = None
    """Largest difference, in the unit of `tolerance`; None if nothing was measured."""
    tolerance: float = 0.0
    """0 means equal bit for bit."""
    passed: bool = False
    is_reached: bool = True
    """False if a run, or the one whose checkpoint it needs, ended before this check; another row has the reason."""
    detail: str = ""


def prove(check: str, run: WatchedRun, work: Callable[[WatchedRun], Proof | Iterable[Proof] | None]) -> list[Proof]:
    """The rows that `work` gives for the run; where it fails, one says that a run left no record for it, or what went wrong."""
    proofs: list[Proof] = []
    try:
        made = work(run)
        proofs.extend([made] if isinstance(made, Proof) else made or ())
    except NotReached as missing:
        (ended,) = missing.args
        has_ended, detail = ended.failure is None, f"{ended.title} succeeded, but left no record to compare"
        proofs.append(Proof(compared=run.title, is_reached=has_ended, detail=detail if has_ended else ""))
    except KeyError as missing:
        proofs.append(Proof(compared=run.title, detail=f"{missing.args[0]} is in one record and not in another"))
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError, IndexError, SafetensorError) as error:  # of libraries
        proofs.append(Proof(compared=run.title, detail=" ".join(str(error).split())))
    return [replace(proof, check=proof.check or check) for proof in proofs]


def exact(compared: str, difference: float, detail: str) -> Proof:
    """The row of a check that passes if nothing differs and there is no `detail`."""
    return Proof(compared=compared, difference=difference, passed=difference == 0 and not detail, detail=detail)


def equal(compared: str, both: Iterable[dict[str, Any]], what: str) -> Proof:
    """The row of a check that passes if both have the same values by the same names; `what` is said of a name that has not."""
    expected, actual = both
    wrong = sorted(name for name in {**expected, **actual} if expected.get(name) != actual.get(name))
    return exact(compared, len(wrong), named(wrong, what))


def within(compared: str, difference: float, detail: str, tolerance: float) -> Proof:
    """The row of a check with a tolerance; `detail` says what is wrong if it fails."""
    passed = difference <= tolerance
    return Proof(compared=compared, difference=difference, tolerance=tolerance, passed=passed, detail="" if passed else detail)


def named(names: list[str], what: str) -> str:
    """The first name followed by `what`, and the number of further names."""
    return f"{names[0]} {what}" + (f", and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


# --- Differences: infinity for NaN, which `max` would overlook.


def relative(difference: Any, expected: Any, floor: float = 1e-30) -> float:
    """The norm of a difference (number or array), relative to the norm of what is expected, or to `floor` if that is larger."""
    # np.linalg.norm takes the threads of BLAS, which wait for each other 50 times as long as they compute.
    apart, whole = (math.sqrt(float(np.square(of, dtype=np.float64).sum())) for of in (difference, expected))
    return math.inf if math.isnan(apart / max(whole, floor)) else apart / max(whole, floor)


def largest(actual: np.ndarray | None, expected: np.ndarray) -> float:
    """The largest difference of two elements; infinity also without a tensor of the expected shape."""
    if actual is None or actual.shape != expected.shape:
        return math.inf
    difference = float(np.abs(actual - expected).max())
    return math.inf if math.isnan(difference) else difference


# --- Steps on their own.


def check_updates(run: WatchedRun, config: OptimConfig) -> Proof:
    """Check weights and moments after steps 1 and 2 against clipping and the optimizer written out in fp64,
    computed from those before, the recorded gradients and the logged learning rate."""
    kind = OPTIMIZERS[config.name].TITLE
    lrs = {line["step"]: line["learning_rate"] for line in run.lines("train")}
    decay = run.about("updated-1")["weight_decay"]
    states = [run.tensors(name) for name in ("loaded", "updated-1", f"saved-{SAVED_STEP}")]
    worst, clips = (0.0, ""), []
    for step, record in enumerate(("gradients", "late_gradients"), start=1):
        gradients = run.tensors(record)
        norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values()))
        clips.append(min(1.0, min(config.max_grad_norm or LARGEST_GRAD_NORM, LARGEST_GRAD_NORM) / (norm + 1e-6)))
        for name, gradient in gradients.items():
            clipped = gradient.astype(np.float64) * clips[-1]
            wrong = _difference(name, clipped, states[step - 1], states[step], step, lrs[step], decay[name], config)
            worst = max(worst, (wrong, f"{name} after step {step} is not what {kind} makes of its gradient"))
    clipping = f"clipped to {min(clips):.0%}" if min(clips) < 1 else "nothing to clip"
    title = f"{run.title}: {kind} written out, 2 steps, {len(decay)} tensors, {clipping}"
    return within(title, *worst, UPDATE_TOLERANCE)


def _difference(
    name: str, gradient: np.ndarray, before: Tensors, after: Tensors, step: int, lr: float, decay: float, config: OptimConfig
) -> float:
    """The largest relative difference of a weight's change and of its optimizer state."""
    prefix = f"optimizer.state.{name}."
    old, new = (state[f"model.{name}"].astype(np.float64) for state in (before, after))
    kept, found = (
        {key.removeprefix(prefix): tensor.astype(np.float64) for key, tensor in state.items() if key.startswith(prefix)}
        for state in (before, after)
    )
    rounding = {key.removeprefix(prefix): 0.5 * (t.dtype == np.uint8) for key, t in after.items()}  # a code is the nearest
    change, expected = OPTIMIZERS[config.name].write_out(config, old, gradient, kept, step, lr, decay)
    last_bits = 2 * np.spacing(np.maximum(np.abs(old), np.abs(new)).astype(np.float32))
    beyond = np.maximum(0, np.abs(new - old - change) - last_bits)
    apart = {key: np.abs(found.get(key, 0) - state) for key, state in expected.items()}
    pairs = [(beyond, change), *((np.maximum(0, apart[key] - rounding.get(key, 0)), state) for key, state in expected.items())]
    return max(relative(wrong, right) for wrong, right in pairs)


def check_dropout(run: WatchedRun) -> Proof | None:
    """Check that no two ranks, micro-batches or steps drop the same elements, and that dropout still drops something after an
    evaluation; None if the model has no dropout."""
    seen = run.about("trained")["dropout"]
    first, seen = ([probe for probe in seen if (probe["step"] == 0) == is_first] for is_first in (True, False))
    if all(probe["loss"] == probe["plain_loss"] for probe in [*first, *seen]):
        return None
    # What each rank and micro-batch drew, in both steps, if they had it in both: two losses may be equal by chance.
    drawn: list[dict[tuple[int, int], list[float | list[bool]]]] = [{}, {}]
    for probe in sorted(seen, key=lambda probe: probe["step"]):
        for of_kind, kind in zip(drawn, ("loss", "mask"), strict=True):
            of_kind.setdefault((probe["rank"], probe["micro_batch"]), []).append(probe[kind])
    drawn = [{place: values for place, values in of_kind.items() if len(values) == len(PROBED_STEPS)} for of_kind in drawn]
    places = sorted(drawn[0])
    equal = [pair for pair in combinations(places, 2) if any(of_kind[pair[0]] == of_kind[pair[1]] for of_kind in drawn)]
    detail = ""
    if any(all(first == second for first, second in of_kind.values()) for of_kind in drawn):
        detail = "steps {} and {} drop the same elements".format(*PROBED_STEPS)
    if equal:
        (one, two), *_ = equal
        detail = f"the same elements are dropped on rank {one[0]}, micro-batch {one[1]} and rank {two[0]}, micro-batch {two[1]}"
    if none := [probe["step"] for probe in seen if probe["loss"] == probe["plain_loss"]]:
        detail = f"dropout drops nothing in step {none[0]}, after an evaluation"
    num_ranks, num_micro_batches = (len({place[i] for place in places}) for i in (0, 1))
    title = f"{run.title}: masks of {num_ranks} ranks, {num_micro_batches} micro-batches"
    return exact(title, float(len(equal) + bool(detail)), detail)
