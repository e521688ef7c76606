"""A recipe with faults put into it from outside: `faulty_recipe.py FAULTS RECIPE FLAGS`, started by `harness.py`.

FAULTS are pickled functions of no arguments, which every rank calls before the recipe starts. Here are the tools that they are
made of. Many wait for a file operation of the process, as Python's audit events report it *before* it is done, whatever code does
it (`before`); then they kill ranks, or raise what a file system would. A fault that strikes says so on stderr (`tell`).
"""

import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tests.support.workbench import RECIPES, step_name


def wrap(owner, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the same arguments ahead of every call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args, **kwargs):
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, both)


def before(event: str, path: str, act: Callable[[], None], *, standing: str = "", times: int = 1) -> None:
    """Call `act` in place of (or before, if it returns) the next file operations of this process that fit.

    Args:
        event: name of a Python audit event: `open`, `os.mkdir`, `os.rename`, `os.remove`, `os.rmdir`, `shutil.rmtree`.
        path: regular expression that is searched for in the event's arguments, as in `FROM TO` of a rename, `PATH MODE` of an
            open. `{4}` stands for the name of the checkpoint of step 4.
        standing: the entry of the checkpoints folder that must be there for it.
        times: of so many operations.
    """
    pattern = re.compile(re.sub(r"\{(\d)\}", lambda number: step_name(int(number[1])), path))
    condition = this_run() / "checkpoints" / standing
    left = [times]

    def hook(name: str, args: tuple) -> None:
        if name != event or not left[0] or not pattern.search(" ".join(map(str, args))) or not os.path.lexists(condition):
            return
        left[0] -= 1
        act()

    sys.addaudithook(hook)


def at_step(step: int, act: Callable[[], None]) -> None:
    """Call `act` in the main thread when this rank begins the first forward pass of a step."""
    from toolkit.training import loop

    seed_all = loop.seed_all

    def act_and_seed(*parts: int | str) -> None:
        if parts[0] == "step" and parts[2:] == (step, this_rank(), 0):
            act()
        seed_all(*parts)

    loop.seed_all = act_and_seed


def in_phase(phase: str, step: int, act: Callable[[], None], nth: int = 1) -> None:
    """Call `act` at the n-th time that the training thread enters a phase of a step, in the watchdog's words."""
    from toolkit.distributed.watchdog import Watchdog

    times: list[bool] = []

    def look(_: Watchdog, phase_now: str, step_now: int | None, **__: bool) -> None:
        if (phase_now, step_now) == (phase, step):
            times.append(True)
            if len(times) == nth:
                act()

    wrap(Watchdog, "enter_phase", look)


def kill(*ranks: int) -> None:
    """SIGKILL; this rank last, if it is among them."""
    tell()
    for number in sorted(ranks, key=lambda number: number == this_rank()):
        os.kill(int(pid_file(number).read_text()), signal.SIGKILL)


def refuse(number: int) -> NoReturn:
    """Raise what the file system would."""
    tell()
    raise OSError(number, os.strerror(number))


def tell() -> None:
    """Say that a fault strikes now."""
    os.write(2, f"\ninjected at {time.time()}\n".encode())


def no_export() -> None:
    """End after the training, which is what most tests are about."""
    from toolkit.training import finetune

    finetune.finish = lambda run: run.sharded.accelerator.end_training()


def this_rank() -> int:
    return int(os.environ.get("RANK", 0))


def this_run() -> Path:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
    return Path(flags["run.output_dir"], flags["run.name"])


def pid_file(rank: int) -> Path:
    return this_run().with_name(f"{this_run().name}.pid-{rank}")


def main() -> None:
    faults, recipe, *flags = sys.argv[1:]
    sys.argv = [f"{recipe}.py", *flags]
    # A rank of `tests.support.launch` has the start method of its server; the loader workers of a real one are its forks.
    multiprocessing.set_start_method("fork", force=True)
    pid_file(this_rank()).parent.mkdir(parents=True, exist_ok=True)
    pid_file(this_rank()).write_text(str(os.getpid()))
    for inject in pickle.loads(bytes.fromhex(faults)):
        inject()
    runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
