"""What a rank of `tests/support/launch.py` does, once the library has made it one of a launch."""

import ctypes
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.planting.plant import plant_in_rank
from toolkit.variables import given

SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Set before the imports, in the server: the libraries read these once."""
PAGES = {"TESTS_DRAW_PAGES": "1"}
"""Environment of a launch whose page or picture is looked at."""
PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Before its work: end with the server, take the fault that is planted, and draw only what is asked for."""
    # The server is this process's parent and ends with pytest: no rank outlives an interrupted test run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = SERVER_ENVIRONMENT["OMP_NUM_THREADS"]
    plant_in_rank()
    if PAGES.items() <= os.environ.items():
        return
    from toolkit.tools.report import page

    # These take rank 0 longer than a tiny run's evaluation, and the other ranks wait for it.
    page.save_run_page = lambda _: None
    page.draw_curves = lambda *_: None


def run_script(command: list[str]) -> None:
    """Run a script or module as `accelerate launch` does."""
    from toolkit.tools.forks import run_command

    prepare()
    run_command(command)


def call(folder: Path, function: Callable, args: tuple) -> None:
    """Call the function, and leave what it returns or raises in `folder`."""
    prepare()
    rank = given("RANK") or 0
    try:
        (folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(function(*args)))
    except Exception as error:
        text = traceback.format_exc()
        try:
            content = pickle.dumps((error, text))
            pickle.loads(content)
        except Exception:
            content = pickle.dumps((RuntimeError(repr(error)), text))
        (folder / f"error-{rank}.pkl").write_bytes(content)
        raise
