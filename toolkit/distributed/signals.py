"""A signal to any rank becomes a decision of all: end at the same step, with one checkpoint.

SIGTERM and SIGINT come from a scheduler or a terminal, through torch elastic, to every rank at slightly different times;
SIGUSR1 is what SLURM can send to a worker ahead of the time limit. A handler only notes the signal. At each step boundary
ranks exchange what they have noted, by an all-reduce on the CPU that is read one boundary later, so that no step waits for it.
A rank whose peer has died gets a SIGTERM too: nothing is saved then, as its peers no longer agree to anything.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed.comm import control_group
from toolkit.errors import Stopped, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Agreement:
    """What holds on all ranks alike."""

    signal_name: str | None
    """A rank was asked to end, by this signal."""
    write_failed: bool
    """A rank could not write its checkpoint or its figures."""


class StopRequests:
    """Within it, signals are noted instead of obeyed. Every rank must enter and leave it."""

    def __init__(self) -> None:
        self.noted = 0
        self.handlers: dict[signal.Signals, Any] = {}
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Stopped | UserError):
            self._read()  # all ranks leave here, and have begun this exchange; left under way, it may abort the interpreter's end
        for number, handler in self.handlers.items():
            # On the way out after a stop there is nothing left to save: one more signal would only spoil the exit code.
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = number  # a second signal changes nothing but the name

    def agree(self, *, write_failed: bool = False) -> Agreement:
        """What ranks had noted at the boundary before this one; what they note now is for the next. Collective."""
        before = self._read()
        values = torch.tensor([self.noted, int(write_failed)], dtype=torch.int64)
        group = control_group()
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True) if group else None
        self.pending = (work, values)
        return before

    def agree_now(self) -> Agreement:
        """What ranks have noted up to now, and the end of the exchange: nothing is left under way. Collective."""
        self.agree()
        last, self.pending = self._read(), None
        return last

    def _read(self) -> Agreement:
        if self.pending is None:
            return Agreement(None, False)
        work, values = self.pending
        if work is not None:
            work.wait()
        number, failed = values.tolist()
        return Agreement(signal.Signals(number).name if number else None, bool(failed))
