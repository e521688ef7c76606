"""Launches ranks as forks of a process that has imported the libraries: as `accelerate launch` does, without their imports.

That process must have one thread and have left CUDA alone. The environment of a rank is what accelerate's own functions make of
the same YAML; what differs is that rank 0 hosts the TCP store, and that all ranks share a seed of string hashes.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any, Self

import numpy

from toolkit.distributed.comm import control_group
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import launched_environment
from toolkit.tools.preset_runs import take_ctrl_c
from toolkit.tools.private import private
from toolkit.tools.recipes import PACKAGE_FOLDER
from toolkit.variables import ACCELERATE_YAML, environment_of_runs, find_launchers, take_environment

PRELOADED = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "accelerate.commands.launch", "transformers.generation", "datasets",
    "rouge_score.rouge_scorer", "peft", "toolkit.training.finetune", "toolkit.objectives.seq2seq", "toolkit.objectives.causal",
    "toolkit.tools.preview.summary", "toolkit.tools.report.facts",
)  # fmt: skip
PEER_GRACE_S, TERM_TO_KILL_S = 5.0, 10.0
"""Seconds that ranks get to end by themselves after one has failed, and after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What ranks need to become those of a launch."""

    accelerate_yaml: Path
    environment: dict[str, str]
    port: int | None
    """Where rank 0 hosts the TCP store; None for a process that meets nobody."""
    streams: list[tuple[Path, Path]]
    work: Callable[[], None]
    """What a rank does then; picklable, where a server forks."""


class Ranks:
    """The ranks of one launch. In a `with`, at whose end whatever still runs is killed."""

    def __init__(self, context: Any, world: World) -> None:
        """Start them as processes of `context`, of multiprocessing: forks of this process or of its server. They end with it."""
        ranks = range(len(world.streams))
        self._processes = [context.Process(target=_become_rank, args=(world, rank), daemon=True) for rank in ranks]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_all(signal.SIGKILL)
        for process in self._processes:
            process.join()

    def end(self, timeout_s: float = threading.TIMEOUT_MAX) -> list[int]:
        """Wait for the ranks; their exit codes, `-9` for signal 9. One that fails takes the others down, as under torch elastic.
        Those that still run after `timeout_s` are killed, which is a `TimeoutError`."""
        deadline, terminate_at, kill_at = time.monotonic() + timeout_s, float("inf"), float("inf")
        while alive := [process for process in self._processes if process.exitcode is None]:
            now = time.monotonic()
            if now >= deadline:
                self._signal_all(signal.SIGKILL)
                raise TimeoutError(f"not finished after {timeout_s} s")
            if terminate_at == float("inf") and any(process.exitcode for process in self._processes):
                terminate_at, kill_at = now + PEER_GRACE_S, now + PEER_GRACE_S + TERM_TO_KILL_S
            if now >= terminate_at:
                self._signal_all(signal.SIGKILL if now >= kill_at else signal.SIGTERM)
                terminate_at = kill_at
            next_event = min(deadline, terminate_at, kill_at, now + 1)
            wait_for_any([process.sentinel for process in alive], timeout=max(0.05, next_event - now))
        return [process.exitcode for process in self._processes]

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal every living rank with its own children (each rank leads a session)."""
        for process in self._processes:
            if process.exitcode is None:
                for send in (os.killpg, os.kill):  # kill: a rank that does not lead its session yet
                    with suppress(ProcessLookupError):
                        send(process.pid, number)


def launch(preset: Path, command: list[str], log_path: Path) -> int:
    """As `preset_runs.launch`; `command` is `-m MODULE ARGUMENT…`."""
    for module in PRELOADED:
        import_module(module)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_bytes(b"")
    mapping = check_accelerate_yaml(preset)
    num_processes = mapping["num_processes"] if mapping["distributed_type"] != "NO" else None
    world = World(
        accelerate_yaml=preset,
        environment=environment_of_runs(PACKAGE_FOLDER.parent),
        port=private("get_free_port")() if num_processes else None,
        streams=[(log_path, log_path)] * (num_processes or 1),
        work=partial(run_command, command),
    )
    take_ctrl_c()
    with Ranks(multiprocessing.get_context("fork"), world) as ranks:
        codes = ranks.end()
    return max(codes) or min(codes)


def take_signals() -> None:
    """Take signals as a process that a terminal has started: with `nohup` or in the background, some are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def run_command(command: list[str]) -> None:
    """Run what `accelerate launch` is given: `SCRIPT ARGUMENT…`, or `-m MODULE ARGUMENT…`."""
    if private("_is_in_bad_fork")():  # a library has initialized CUDA at its import
        os.execv(sys.executable, [sys.executable, *command])
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _become_rank(world: World, rank: int) -> None:
    """Become what `accelerate launch` would have started, work, and leave as a real process does."""
    code = 1
    try:
        take_signals()
        os.setsid()  # Ctrl-C reaches the launching process alone
        multiprocessing.current_process().daemon = False  # may have workers of its own
        for file, stream in zip(world.streams[rank], (sys.stdout, sys.stderr), strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        take_environment(world.environment | {ACCELERATE_YAML: str(world.accelerate_yaml)})
        take_environment(launched_environment(world.accelerate_yaml, len(world.streams)) | _of_rank(world, str(rank)))
        for known in (control_group, find_launchers):  # of the launching process
            known.cache_clear()
        numpy.random.seed()  # forks would all draw the same numbers, unlike real processes
        world.work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _of_rank(world: World, rank: str) -> dict[str, str]:
    """What torch elastic adds to the environment of a rank."""
    size = str(len(world.streams))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.port)}
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size} | meeting if world.port else {}
