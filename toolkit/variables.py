"""What launchers and users say by environment variables, one function per fact.

`toolkit/launch/environment.py` reads those that accelerate, torch and GPUs go by; no other module reads any.
"""

from __future__ import annotations

import os
from pathlib import Path

ACCELERATE_YAML = "TOOLKIT_ACCELERATE_YAML"
INIT_METHOD = "TOOLKIT_INIT_METHOD"
LOG_LEVEL = "TOOLKIT_LOG_LEVEL"
STARTED_BY = "TOOLKIT_STARTED_BY"
"""The process id of `compare` or `verify`, for the runs that they start."""


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
