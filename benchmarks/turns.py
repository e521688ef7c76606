"""Sides of a comparison that take turns: each is a process that is started once and works only when it is its turn.

So a start is paid once a side, and a machine that is busy for a while slows all sides alike. A side reads a line from its
standard input before each turn, and ends where there is none. It prints its figures after each turn.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.measuring import Figures, side_environment

MARK = "TURN "


class Turns:
    """In a side: waits for each turn and reports it."""

    def begin(self) -> None:
        """Wait for the turn, and start its clock. Ends the process where there is no other turn."""
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)  # in the middle of its training: no export, no last save
        self.restart_clock()

    def restart_clock(self) -> None:
        self.start_s = time.perf_counter()

    def end(self, **figures: float) -> None:
        """Report the turn's figures, its `seconds` unless given, and on a GPU `gpu_gib`, the most allocated so far."""
        seconds, torch = time.perf_counter() - self.start_s, sys.modules.get("torch")
        gpu = {"gpu_gib": torch.cuda.max_memory_allocated() / 2**30} if torch and torch.cuda.is_available() else {}
        print(MARK + json.dumps({"seconds": seconds} | gpu | figures), flush=True)


class Side:
    """In the driver: a side's process.

    Its standard error, and whatever it prints beside its turns, is kept for the message of a failure.
    """

    def __init__(self, command: Sequence[str | Path], *, num_threads: int) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            **side_environment(num_threads),
        )

    def take_turn(self) -> Figures:
        """Let it work; its figures.

        Raises:
            RuntimeError: it failed; with the end of what it printed.
        """
        assert self._process.stdin and self._process.stdout
        said: list[str] = []
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its output says why
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            said.append(line)
        self._errors.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{''.join(said)[-1500:]}\n{self._errors.read()[-3000:]}")

    def close(self) -> float:
        """End it; the largest resident memory of any one of its processes, in GiB."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.read()
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._process.stdout.close()
        self._errors.close()
        return usage.ru_maxrss / 2**20  # kB on Linux
