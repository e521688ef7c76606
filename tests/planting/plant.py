"""Plant a fault by its name, in this process and in every rank that `tests.support.launch` starts from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

VARIABLE = "PLANTED_FAULT"
"""Its name in the environment of a rank; `tests/support/rank.py` reads it."""
NO_FAULT = {VARIABLE: ""}
"""Environment of ranks that a fault must not reach, as those of a reference."""

Patch = Callable[[pytest.MonkeyPatch], None]
"""Puts a fault into this process."""


@contextlib.contextmanager
def planted(name: str, *, only_in_ranks: bool = False) -> Iterator[None]:
    """The fault is there for as long as this lasts; `none` plants nothing.

    Args:
        only_in_ranks: this process, which compares, keeps its libraries whole.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, name)
        if not only_in_ranks:
            plant(name, patch)
        yield


def plant_in_rank() -> None:
    """In a rank, before its work: for good."""
    if name := os.environ.get(VARIABLE):
        plant(name, pytest.MonkeyPatch())


def plant(name: str, patch: pytest.MonkeyPatch) -> None:
    """Put it into this process."""
    from tests.planting.faults import FAULTS

    if name != "none":
        FAULTS[name].patch(patch)
