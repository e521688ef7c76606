"""Adapts presets to the processes of this machine and launches recipes with them, for `compare` and `verify`."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.tools.recipes import PACKAGE_FOLDER, SHIPPED, find_shipped
from toolkit.variables import environment_of_runs

STOP_TO_KILL_S = 30.0
"""Seconds that ranks get to end after SIGTERM, as under torch elastic: they save a checkpoint."""
EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?(?P<all>(?P<kind>[\w.]+(Error|Exception)): .*)")
"""The last line of a traceback. torch puts the rank before each line."""


def find_preset(name: str) -> Path:
    """The accelerate YAML at the path `name`, or of that name in `accelerate_configs/`, with or without `.yaml`; if there is
    none, a `UserError` names those that exist."""
    presets = SHIPPED / "accelerate_configs"
    for path in (Path(name), *(find_shipped(presets.name, file) for file in (name, f"{name}.yaml"))):
        if path.is_file():
            return path
    existing = ", ".join(sorted(path.stem for path in presets.glob("*.yaml"))) or "none here"
    raise UserError(f"preset {name} is neither a file nor one of {presets} ({existing}): give one of them, or a path")


def adapt_preset(mapping: dict[str, Any], *, num_processes: int | None, use_cpu: bool) -> dict[str, Any]:
    """A preset, as a parsed accelerate YAML, changed to run on one machine, with other processes or on the CPU; nothing else
    changes, nor does `mapping`. Without `num_processes` it keeps its number, and a preset for one process keeps one. A 2-D mesh
    over an odd number of processes, or over fewer than four, is a `UserError`."""
    adapted = {**mapping, "num_machines": 1, "machine_rank": 0, "main_process_ip": None, "main_process_port": 0}
    if num_processes is not None and mapping["distributed_type"] != "NO":
        adapted["num_processes"] = num_processes
    if use_cpu:
        adapted["use_cpu"] = True
        fsdp = mapping.get("fsdp_config") or {}
        if mapping["distributed_type"] == "FSDP" and fsdp.get("fsdp_version", 1) == 1:
            # FSDP1 broadcasts module states through an accelerator only ("no available devices found").
            adapted["fsdp_config"] = {**fsdp, "fsdp_sync_module_states": False}
    if mapping.get("parallelism_config"):
        total = adapted["num_processes"]
        if total < 4 or total % 2:
            raise UserError(f"a mesh of replicas and shards needs an even number of processes, 4 or more, not {total}")
        mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": total // 2}
        adapted["parallelism_config"] = mapping["parallelism_config"] | mesh
    return adapted


def save_preset(mapping: dict[str, Any], path: Path) -> Path:
    """Write an accelerate YAML and check it as a run does: one that a run would refuse is a `UserError`."""
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")
    check_accelerate_yaml(path)
    return path


def launch(preset: Path, command: list[str], log_path: Path) -> int:
    """Run `accelerate launch --config_file PRESET COMMAND…` to its end; returns its exit status.

    Its output goes into `log_path`. The ranks import the same toolkit as this process, installed or not.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    take_ctrl_c()
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(
            # Quiet: without a traceback of the launcher's own after one process (accelerate/commands/launch.py:998).
            [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(preset), *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of_runs(PACKAGE_FOLDER.parent),
        )
        try:
            return launcher.wait()
        except BaseException:  # Ctrl-C ends all of them now, not with this process or after their next step
            import psutil

            processes: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):  # the launcher has ended
                processes.append(psutil.Process(launcher.pid))
                processes += processes[0].children(recursive=True)
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            for process in psutil.wait_procs(processes, timeout=STOP_TO_KILL_S)[1]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            launcher.wait()
            raise


def take_ctrl_c() -> None:
    """Take SIGINT as the launcher and its ranks do, also where a shell has started this command in the background and has it
    ignored: they would stop, and the next run would begin."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reason_of_failure(log_path: Path) -> str:
    """The error sentence of a rank, else the last exception that is not the launcher's own, else the last line."""
    lines = [line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    if sentences := [line for line in lines if line.startswith("error: ")]:
        return sentences[-1].removeprefix("error: ")
    ends = [match for line in lines if (match := EXCEPTION.fullmatch(line)) and not match["kind"].endswith("ChildFailedError")]
    errors = [match["all"] for match in ends]
    return (errors or lines or ["it printed nothing"])[-1]
