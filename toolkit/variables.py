"""What launchers and users say by environment variables, one function per fact; and the processes that started this rank and wait
for its end: a run whose launcher is gone saves and ends.

`toolkit/launch/environment.py` reads the variables that accelerate, torch and GPUs go by; no other module reads any.
accelerate's launcher of one process passes no signal on (accelerate/commands/launch.py:992), and one that is killed can pass none
on: without this its ranks would train to the end, on devices that somebody else may have been given. A program that was started
by hand, under `nohup` or in a notebook, has no launcher.
"""

import functools
import os
import select
from contextlib import suppress
from pathlib import Path, PurePath

ACCELERATE_YAML = "TOOLKIT_ACCELERATE_YAML"
INIT_METHOD = "TOOLKIT_INIT_METHOD"
LOG_LEVEL = "TOOLKIT_LOG_LEVEL"
STARTED_BY = "TOOLKIT_STARTED_BY"
"""The process id of `compare` or `verify`, for the runs that they start."""
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def given(name: str) -> str | None:
    """One of the variables above, or of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as it stands."""
    return os.environ.get(name)


def is_rank_0() -> bool:
    """Whether the launcher calls this process rank 0, or none has numbered it."""
    return os.environ.get("RANK", "0") == "0"


def num_launched() -> int:
    """Number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first_node() -> bool:
    """Whether torch elastic calls this node the first, or has not started this process."""
    return os.environ.get("GROUP_RANK", "0") == "0"


def elastic_error_file() -> Path | None:
    """Where torch elastic reads this rank's error, below the folder of one attempt of this node's processes."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file else None


def has_agents_store() -> bool:
    """Whether the ranks meet in the store of torch elastic's agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def environment_of_runs(root: Path) -> dict[str, str]:
    """This environment, for runs that this process starts: they import the toolkit that lies in `root`, and end with it."""
    python_path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": python_path, STARTED_BY: str(os.getpid())}


def take_environment(environment: dict[str, str]) -> None:
    """Make this the environment of this process."""
    os.environ.clear()
    os.environ.update(environment)


def tokenize_in_one_thread() -> None:
    """In a forked process: the threads of `tokenizers` do not outlive the fork, of which it would warn."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def in_utf8() -> dict[str, str]:
    """This environment, for a Python that reads and writes UTF-8."""
    return {**os.environ, "PYTHONUTF8": "1"}


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
