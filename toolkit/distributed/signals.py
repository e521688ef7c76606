"""Stops all ranks at the same step, with one checkpoint, when any of them gets a signal.

SIGTERM and SIGINT come from a scheduler or a terminal, through torch elastic, to every rank at slightly different times.
A closed terminal sends SIGHUP. SLURM can send SIGUSR1 to a worker ahead of the time limit. A handler only records the signal;
the end of the launcher is recorded like one. At each step boundary the ranks
exchange what they have recorded, by an all-reduce on the CPU that is read one boundary later, so that no step waits for it.
A rank whose peer has died gets a SIGTERM too. Nothing is saved then, because the ranks can no longer agree.
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
from toolkit.errors import SIGNALS, Stopped, UserError
from toolkit.variables import launcher_is_gone

LAUNCHER_GONE = "the end of its launcher"
_GONE = 1000
"""Stands for `LAUNCHER_GONE` among the numbers of signals."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on."""

    signal_name: str | None
    """The signal that asked a rank to stop, or `LAUNCHER_GONE`."""
    write_failed: bool
    """A rank could not write its checkpoint or its metrics."""
    differ: bool = False
    """The ranks' fingerprints were not equal."""


class StopRequests:
    """A context in which signals are recorded instead of obeyed. Every rank must enter and leave it."""

    def __init__(self) -> None:
        self.noted = 0
        self.handlers: dict[signal.Signals, Any] = {}
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            # `nohup` without a launcher: a rank that was started to survive its terminal does.
            is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            noted = [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]
            self.handlers = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Stopped | UserError):
            self._read()  # all ranks leave here and have started this exchange; a pending one may abort the interpreter's exit
        for number, handler in self.handlers.items():
            # After a stop nothing is left to save, and one more signal would only change the exit code.
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = number  # a second signal changes only the name

    def agree(self, *, write_failed: bool = False, fingerprint: int = 0) -> Agreement:
        """What the ranks had recorded at the previous boundary, and start the exchange that the next one reads. Collective."""
        before = self._read()
        if launcher_is_gone():
            self.noted = _GONE
        values = torch.tensor([self.noted, int(write_failed), fingerprint, -fingerprint], dtype=torch.int64)
        group = control_group()
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True) if group else None
        self.pending = (work, values)
        return before

    def agree_now(self) -> Agreement:
        """What the ranks have recorded up to now; leaves no exchange pending. Collective."""
        self.agree()
        now, self.pending = self._read(), None
        return now

    def _read(self) -> Agreement:
        if self.pending is None:
            return Agreement(None, False)
        work, values = self.pending
        if work is not None:
            work.wait()
        number, failed, largest, smallest = values.tolist()
        name = LAUNCHER_GONE if number == _GONE else signal.Signals(number).name if number else None
        return Agreement(name, bool(failed), largest != -smallest)
