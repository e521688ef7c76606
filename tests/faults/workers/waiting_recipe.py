"""A recipe that one rank holds up: `waiting_recipe.py HOLDS RECIPE FLAGS…`, started by test_hangs.py.

HOLDS is JSON: [[place, rank, way], …]. A place is one of `PLACES`, or a phase of the training loop, which holds in `STEP`.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.faults.workers.faulty_recipe import wrap
from tests.support.launch import REPOSITORY
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint import save as checkpoint_writer
from toolkit.data.tokens import prepare
from toolkit.distributed.comm import rank
from toolkit.distributed.watchdog import Watchdog
from toolkit.export.model_files import ModelFiles
from toolkit.training import setup

TIMEOUT_S = 4
"""Of the watchdog."""
BUSY_S = 1.5 * TIMEOUT_S
"""How long what moves goes on."""
FOREVER_S = 600.0
STEP = 3

PLACES: dict[str, tuple[Any, str]] = {
    "connecting the devices": (setup, "connect_devices"),  # which rank 1 never calls
    "tokenizing": (prepare, "tokenize_rows"),  # on rank 0 alone
    "after tokenizing": (prepare, "on_all_ranks"),  # where rank 1 has nothing to tokenize
    "loading the checkpoint": (checkpoint, "load_tensors"),
    "saving": (checkpoint_writer, "describe_files"),  # in the thread that writes the first checkpoint
    "export": (ModelFiles, "add"),  # on rank 0 alone, between two gathers
}


def sleep() -> None:
    time.sleep(FOREVER_S)


def stop() -> None:
    time.sleep(1)  # time enough to have reported its place
    os.kill(os.getpid(), signal.SIGSTOP)


def compute() -> None:
    end_s = time.monotonic() + BUSY_S
    while time.monotonic() < end_s:
        hashlib.sha256(bytes(2**22))


def write_slowly() -> None:
    """As on a slow file system: hardly any CPU time."""
    end_s = time.monotonic() + BUSY_S
    with tempfile.TemporaryFile(buffering=0) as file:
        while time.monotonic() < end_s:
            file.write(bytes(2**15))
            time.sleep(0.2)


WAYS: dict[str, Callable[[], None]] = {way.__name__: way for way in (sleep, stop, compute, write_slowly)}


def main(holds: str, recipe: str, *flags: str) -> None:
    """The recipe as it stands, except for the holds."""

    def hold_in_step(phase: str, who: int, way: str) -> None:
        enter_phase = Watchdog.enter_phase

        def enter_and_hold(watchdog: Watchdog, entered: str, step: int | None, **how: bool) -> None:
            enter_phase(watchdog, entered, step, **how)
            if (entered, step, rank()) == (phase, STEP, who):
                WAYS[way]()

        Watchdog.enter_phase = enter_and_hold  # type: ignore[method-assign]

    def hold(place: str, who: int, way: str) -> None:
        calls: list[bool] = []

        def hold_once(*_: Any, **__: Any) -> None:
            if rank() == who and not calls:
                calls.append(True)
                WAYS[way]()

        wrap(*PLACES[place], hold_once)

    for place, who, way in json.loads(holds):
        (hold if place in PLACES else hold_in_step)(place, who, way)
    path = REPOSITORY / "recipes" / f"{recipe}.py"
    sys.argv = [str(path), *flags]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
