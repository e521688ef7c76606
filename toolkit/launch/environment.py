"""The environment that `accelerate launch` makes from an accelerate YAML, for ranks that another launcher started.

`srun python recipes/t5.py`, torchrun or a shell give a process its RANK and WORLD_SIZE but do not read the YAML. If
`TOOLKIT_ACCELERATE_YAML` names one, accelerate's own functions put its values into the environment, as its launcher does.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch.accelerate_yaml import check_accelerate_yaml, find_accelerate_yaml
from toolkit.private import private


def read_launch() -> None:
    """Check the accelerate YAML that launched this process, and complete the environment that the launcher made of it.

    Raises:
        UserError: an unknown or useless key in the YAML.
    """
    if path := find_accelerate_yaml():
        mapping = check_accelerate_yaml(path)
        if not is_launched():
            if mapping.get("mixed_precision") == "fp8":
                check_torchao()
            join_launch(path, mapping)
        if mapping.get("use_cpu"):
            # The launcher passes `use_cpu` to a single process only; several would use the GPUs of a machine that has them.
            os.environ["ACCELERATE_USE_CPU"] = "true"


def check_torchao() -> None:
    """Raise a UserError if torchao is not installed, which float8 needs."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError("mixed_precision is fp8, but torchao is not installed: run pip install 'torchao>=0.18', or write bf16")


def asked_for_cpu() -> bool:
    """Whether the launch is for the CPU, also where there are GPUs; call it after `read_launch`."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")


def is_launched() -> bool:
    """Whether `accelerate launch` has set the environment of this process, or `join_launch` has."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def join_launch(path: Path, mapping: dict[str, Any]) -> None:
    """Set up this process as one that `accelerate launch --config_file` would start from this YAML.

    Args:
        mapping: the file's content, already checked.

    Raises:
        UserError: the number of started processes differs from the file's.
    """
    # The number of processes must fit the file and the machines.
    given = os.environ.get("WORLD_SIZE", "1")
    num_processes = mapping.get("num_processes", 1 if mapping["distributed_type"] == "NO" else given)
    if str(num_processes) != given:
        how = f"WORLD_SIZE is {given}" if "WORLD_SIZE" in os.environ else "no launcher has set WORLD_SIZE and RANK"
        raise UserError(
            f"{path}: num_processes is {num_processes}, but {how}: start so many, each with its RANK, or use accelerate launch"
        )
    num_machines = mapping.get("num_machines", 1)
    if not given.isdecimal() or not int(given) or int(given) % num_machines:
        raise UserError(
            f"WORLD_SIZE is {given}, but the num_machines of {path} is {num_machines}: start equally many on each, at least one"
        )

    # Accelerate's variables, and the ranks that no launcher has set.
    num_local = int(given) // num_machines
    rank = os.environ.get("RANK", "0")
    os.environ.update(launched_environment(path, int(given)))
    if mapping["distributed_type"] != "NO":
        os.environ.setdefault("RANK", rank)
        os.environ.setdefault("WORLD_SIZE", given)
        # Ranks are numbered machine by machine, as all launchers do by default.
        os.environ.setdefault("LOCAL_RANK", str(int(rank) % num_local) if rank.isdecimal() else "0")
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(num_local))
        if given == "1":  # torch needs an address even for one process
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(private("get_free_port")()))


def launched_environment(path: Path, num_processes: int) -> dict[str, str]:
    """This environment plus what `accelerate launch --config_file` sets for every process, without ranks and addresses."""
    from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    words = ["--config_file", str(path), "--num_processes", str(num_processes), "script.py"]
    args = private("_validate_launch_command")(private("launch_command_parser")().parse_args(words))[0]
    if not (args.use_fsdp or args.multi_gpu):
        return prepare_simple_launcher_cmd_env(args)[1]
    args.main_process_port = 0  # no launcher listens; another port would be checked for being free
    return prepare_multi_gpu_env(args)
