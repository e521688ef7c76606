"""The processes that started this rank and wait for its end: a run whose launcher is gone saves and ends.

accelerate's launcher of one process passes no signal on (accelerate/commands/launch.py:992), and one that is killed can pass none
on: without this its ranks would train to the end, on devices that somebody else may have been given. A program that was started
by hand, under `nohup` or in a notebook, has no launcher.
"""

from __future__ import annotations

import functools
import os
import select
from contextlib import suppress
from pathlib import PurePath

from toolkit.variables import STARTED_BY, given

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@functools.cache
def find_launchers() -> select.poll:
    """Watch the launcher among this process's parents, and what started it. Call it early: importing torch takes seconds."""
    import psutil

    watched = select.poll()
    caller = given(STARTED_BY) or ""
    pids = [int(caller)] if caller.isdecimal() else []
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            command = parent.cmdline()
            is_torchrun = any(
                PurePath(word).name in _TORCHRUN or word.endswith("torch/distributed/run.py") for word in command[:4]
            )
            pids += [parent.pid] if is_torchrun or launch_arguments(command) is not None else []
    for pid in pids:
        with suppress(OSError, AttributeError):  # a system without pidfds watches none
            watched.register(os.pidfd_open(pid), select.POLLIN)
    return watched


def launcher_is_gone() -> bool:
    """Whether a launcher that `find_launchers` has found has ended."""
    return bool(find_launchers().poll(0))


def launch_arguments(command: list[str]) -> list[str] | None:
    """The arguments after `accelerate launch` in a command line, in any of the ways to call it; None if it is another command."""
    for index, word in enumerate(command):
        name, rest = PurePath(word).name, command[index + 1 :]
        if name == "accelerate-launch" or word == "accelerate.commands.launch" or word.endswith("accelerate/commands/launch.py"):
            return rest
        if name in ("accelerate", "accelerate.commands.accelerate_cli") and rest[:1] == ["launch"]:
            return rest[1:]
    return None
