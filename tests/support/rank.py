"""The rank's side of `tests/support/launch.py`: what a fork of the server does to become a process of `accelerate launch`."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planting.plant import plant_in_rank

SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Set before the imports, in the server: the libraries read these once."""
PAGES = {"TESTS_DRAW_PAGES": "1"}
"""Environment of a launch whose page or picture is looked at."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class World:
    """What a rank needs to become one; pickled into every fork."""

    folder: Path
    accelerate_yaml: Path
    num_processes: int
    master_port: int | None
    """None where one process meets nobody."""
    environment: dict[str, str]
    script: Path | None = None
    argv: list[str] = field(default_factory=list)
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()


def as_in_a_terminal() -> None:
    """Take signals as a process that a terminal has started: with `nohup` or in the background, the tests have some ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def run_rank(world: World, rank: int) -> None:
    """Body of a rank: become what `accelerate launch` would have started, run, and leave as a real process does."""
    as_in_a_terminal()
    os.setsid()
    # The server is this process's parent and ends with pytest: no rank outlives an interrupted test run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers of its own
    for stream, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(world.folder / f"{stream}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = _exit_code(world, rank)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(world: World, rank: int) -> int:
    """Run the rank's work; the exit status that the interpreter would give."""
    try:
        _set_environment(world, rank)
        plant_in_rank()
        _draw_nothing_unasked()
        if world.script is None:
            _call_function(world, rank)
        else:
            sys.argv = [str(world.script), *world.argv]
            sys.path.insert(0, str(world.script.parent))
            runpy.run_path(str(world.script), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _call_function(world: World, rank: int) -> None:
    assert world.function is not None
    try:
        result = world.function(*world.args)
        (world.folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))
    except Exception as error:
        text = traceback.format_exc()
        try:
            content = pickle.dumps((error, text))
            pickle.loads(content)
        except Exception:
            content = pickle.dumps((RuntimeError(repr(error)), text))
        (world.folder / f"error-{rank}.pkl").write_bytes(content)
        raise


def _set_environment(world: World, rank: int) -> None:
    """Set `os.environ` as `accelerate launch --config_file` and torch elastic would, and let no random state be shared."""
    os.environ.clear()
    os.environ.update(world.environment)
    os.environ["TOOLKIT_ACCELERATE_YAML"] = str(world.accelerate_yaml)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(_accelerate_environment(world, rank))
    os.environ["OMP_NUM_THREADS"] = SERVER_ENVIRONMENT["OMP_NUM_THREADS"]
    # numpy's global generator was seeded once, in the server: forks would all draw the same numbers, unlike real processes.
    import numpy

    numpy.random.seed()


def _draw_nothing_unasked() -> None:
    """Leave out a run's page and picture, unless the launch asks for `PAGES`.

    They take rank 0 longer than a tiny run's evaluation, and the other ranks wait for it.
    """
    if PAGES.items() <= os.environ.items():
        return
    from toolkit.tools.report import page, picture

    page.save_run_page = lambda _: None
    picture.draw_curves = lambda *_: None


def _accelerate_environment(world: World, rank: int) -> dict[str, str]:
    """What `accelerate launch` sets, and the rank variables that torch elastic adds."""
    from toolkit.launch.environment import launched_environment

    environment = launched_environment(world.accelerate_yaml, world.num_processes)
    if world.master_port is None:
        return environment
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.num_processes),
        "LOCAL_WORLD_SIZE": str(world.num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(world.master_port),
    }
