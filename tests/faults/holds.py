"""What holds up one rank, as faults of `harness.py`: each is called on every rank."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.faults.workers.faulty_recipe import in_phase, this_rank, wrap
from toolkit.checkpoint import load as checkpoint
from toolkit.checkpoint import save as checkpoint_writer
from toolkit.data.tokens import prepare
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


def suspend() -> None:
    """As a scheduler does, for longer than the watchdog's patience."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


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


def hold(place: str, who: int, way: Callable[[], None]) -> None:
    """One rank is held up, once: at one of `PLACES`, or before a phase of `STEP`."""
    calls: list[bool] = []

    def hold_once(*_: Any, **__: Any) -> None:
        if not calls:
            calls.append(True)
            way()

    if this_rank() == who and place in PLACES:
        wrap(*PLACES[place], hold_once)
    elif this_rank() == who:
        in_phase(place, STEP, hold_once)
