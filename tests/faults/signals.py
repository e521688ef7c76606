"""Signals that are put into a recipe at a chosen moment, from outside: functions of the toolkit are replaced before it starts.

Each is called on every rank, as a fault of `harness.py`.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.faults.workers.faulty_recipe import at_step, in_phase, this_rank, wrap

HELD_S = 0.4


def send(ranks: list[int], signals: Sequence[str], to_group: bool = False) -> None:
    """Signals to this process, or to its group with its loader workers in it, where it is one of `ranks`."""
    if this_rank() in ranks:
        for name in signals:
            print(f"got {name}", flush=True)
            (os.killpg if to_group else os.kill)(os.getpid(), getattr(signal, name))


def signal_in_phase(
    phase: str, step: int, ranks: list[int], signals: Sequence[str], nth: int = 1, to_group: bool = False
) -> None:
    """At the n-th time that the training thread enters a phase of a step."""
    in_phase(phase, step, partial(send, ranks, signals, to_group), nth)


def signal_in_generation(call: int, ranks: list[int], signals: Sequence[str]) -> None:
    """Inside the n-th `generate` of this rank."""
    from transformers import GenerationMixin

    calls = Counter[str]()

    def look(*_, **__) -> None:
        calls["generate"] += 1
        if calls["generate"] == call + 1:  # the first tries the evaluation before training
            send(ranks, signals)

    wrap(GenerationMixin, "_prepare_generation_config", look)


def signal_and_hold(name: str) -> None:
    """This process gets it, and what it was about to do waits, so that training goes on beside it."""
    send([this_rank()], [name])
    time.sleep(HELD_S)


def tell_saves() -> None:
    """Each rank says when it begins to save."""
    from toolkit.checkpoint.save import CheckpointWriter

    wrap(CheckpointWriter, "save", lambda _, state, **__: print(f"saving step {state.step}", flush=True))


def signals_until_the_end(signals: Sequence[str], every_s: float) -> None:
    """Every rank gets them again and again, from the first step on, until it has gone. A process of its own sends them."""
    from toolkit.distributed.signals import StopRequests

    def start() -> None:
        pid = os.getpid()
        if os.fork() == 0:
            with suppress(ProcessLookupError):
                while os.getppid() == pid:
                    for name in signals:
                        time.sleep(every_s)
                        os.kill(pid, getattr(signal, name))
            os._exit(0)

    entered = StopRequests.__enter__

    def enter(self: StopRequests) -> StopRequests:
        start()
        return entered(self)

    StopRequests.__enter__ = enter


def wait_for_signal(step: int, file: str) -> None:
    """Each rank says in `file`-<rank> that it has begun a step, and waits there until a signal is noted, or its launcher is gone
    (two minutes at most)."""
    from toolkit.distributed.signals import StopRequests, launcher_is_gone

    stops: list[StopRequests] = []
    wrap(StopRequests, "__enter__", stops.append)

    def wait() -> None:
        Path(f"{file}-{this_rank()}").touch()
        give_up_at = time.monotonic() + 120
        while not stops[0].noted and not launcher_is_gone() and time.monotonic() < give_up_at:
            time.sleep(0.02)

    at_step(step, wait)
