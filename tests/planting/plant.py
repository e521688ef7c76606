"""Plant a fault by its name, in this process and in every rank that `tests.support.launch` starts from it."""

import contextlib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

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


def change(patch: pytest.MonkeyPatch, function: Callable[..., Any], *edits: tuple[str, str]) -> None:
    """Edit a function's source, each text that stands there once into another, wherever the function was imported before."""
    plain = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(plain))
    for right, wrong in edits:
        assert source.count(right) == 1, f"{right!r} does not stand once in {plain.__qualname__}"
        source = source.replace(right, wrong)
    names = dict(plain.__globals__)
    exec(f"from __future__ import annotations\n{source}", names)
    patch.setattr(plain, "__code__", inspect.unwrap(names[plain.__name__]).__code__)


def after_sharding(patch: pytest.MonkeyPatch, spoil: Callable[[Any], object]) -> None:
    """Do this to every model once it is sharded."""
    from toolkit.training import model as setup

    shard_model = setup.shard_model

    def shard_and_spoil(*args: Any, **settings: Any) -> Any:
        sharded = shard_model(*args, **settings)
        spoil(sharded)
        return sharded

    patch.setattr(setup, "shard_model", shard_and_spoil)
