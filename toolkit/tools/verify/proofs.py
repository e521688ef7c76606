"""Rows of `verify`'s table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.tools.verify.records import NotReached
from toolkit.tools.verify.runs import WatchedRun


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
