"""Launches ranks as forks of this process, which has imported the libraries: as `accelerate launch` does, without their imports.

This process must have one thread and have left CUDA alone. The environment of a rank is what accelerate's own functions make of
the same YAML; what differs is that rank 0 hosts the TCP store, and that all ranks share a seed of string hashes.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy

from toolkit.distributed.comm import control_group
from toolkit.distributed.launchers import find_launchers
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import launched_environment
from toolkit.tools.preset_runs import end, taking_ctrl_c
from toolkit.tools.private import private
from toolkit.tools.project import PACKAGE_FOLDER
from toolkit.variables import ACCELERATE_YAML, environment_of_runs, take_environment

PRELOADED = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "accelerate.commands.launch", "transformers.generation", "datasets",
    "rouge_score.rouge_scorer", "peft", "toolkit.training.finetune", "toolkit.tasks.seq2seq", "toolkit.tasks.causal",
    "toolkit.tools.preview.summary", "toolkit.tools.report.record",
)  # fmt: skip
PEER_GRACE_S = 5.0
"""Seconds that ranks get to end by themselves after one has failed."""


def launch(preset: Path, command: list[str], log_path: Path) -> int:
    """As `preset_runs.launch`; `command` is `-m MODULE ARGUMENT…`."""
    import psutil

    for module in PRELOADED:
        import_module(module)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_bytes(b"")
    mapping, meeting = check_accelerate_yaml(preset), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(private("get_free_port")())}
    num_processes = mapping["num_processes"] if mapping["distributed_type"] != "NO" else 1
    environment = environment_of_runs(PACKAGE_FOLDER.parent) | {ACCELERATE_YAML: str(preset)}
    alive = []
    for rank in map(str, range(num_processes)):
        size = str(num_processes)
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        pid = os.fork()
        if pid == 0:
            _run_rank(preset, num_processes, environment, of_rank | meeting if size != "1" else {}, command, log_path)
        alive.append(psutil.Process(pid))
    # A rank that fails takes the others down, as under torch elastic.
    try:
        with taking_ctrl_c():
            while alive:
                ended, alive = psutil.wait_procs(alive, timeout=1.0)
                if failed := [rank.returncode for rank in ended if rank.returncode]:
                    end(psutil.wait_procs(alive, timeout=PEER_GRACE_S)[1])
                    return failed[0]
    except BaseException:  # Ctrl-C
        end(alive)
        raise
    return 0


def _run_rank(
    preset: Path, num_processes: int, environment: dict[str, str], of_rank: dict[str, str], command: list[str], log_path: Path
) -> None:
    """Become what `accelerate launch` would have started, run, and leave as a real process does."""
    code = 1
    try:
        os.setsid()  # Ctrl-C reaches the launching process alone
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        take_environment(environment)
        take_environment(environment | launched_environment(preset, num_processes) | of_rank)
        if private("_is_in_bad_fork")():  # a library has initialized CUDA at its import
            os.execv(sys.executable, [sys.executable, *command])
        for known in (control_group, find_launchers):  # of the launching process
            known.cache_clear()
        numpy.random.seed()  # forks would all draw the same numbers, unlike real processes
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
