"""The rows of the table, and the differences that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError

from toolkit.tools.verify.runs import NotReached, WatchedRun


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
