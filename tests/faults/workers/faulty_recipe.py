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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.support.workbench import RECIPES, step_name

STRIKES = "a fault strikes"
"""The line of `tell`."""


def wrap(owner, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the same arguments ahead of every call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args, **kwargs):
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, both)


def before(event: str, path: str, act: Callable[[], None], *, standing: str = "") -> None:
    """Call `act` in place of (or before, if it returns) the next file operation of this process that fits.

    Args:
        event: name of a Python audit event: `open`, `os.mkdir`, `os.rename`, `os.remove`, `os.rmdir`, `shutil.rmtree`.
        path: regular expression that is searched for in the event's arguments, as in `FROM TO` of a rename, `PATH MODE` of an
            open. `{4}` stands for the name of the checkpoint of step 4.
        standing: the entry of the checkpoints folder that must be there for it.
    """
    pattern = re.compile(re.sub(r"\{(\d)\}", lambda number: step_name(int(number[1])), path))
    condition = this_run() / "checkpoints" / standing
    is_done: list[bool] = []

    def hook(name: str, args: tuple) -> None:
        if name == event and not is_done and pattern.search(" ".join(map(str, args))) and os.path.lexists(condition):
            is_done.append(True)
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
    os.write(2, f"\n{STRIKES}\n".encode())


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


# --- Signals.


def send(ranks: list[int], signals: Sequence[str], to_group: bool = False) -> None:
    """Signals to this process, or to its group with its loader workers in it, where it is one of `ranks`."""
    if this_rank() in ranks:
        for name in signals:
            print(f"got {name}", flush=True)
            (os.killpg if to_group else os.kill)(os.getpid(), getattr(signal, name))


def signal_in_phase(
    phase: str, step: int, ranks: list[int], signals: Sequence[str], nth: int = 1, to_group: bool = False
) -> None:
    """At the n-th time that the training thread enters a phase of a step."""
    in_phase(phase, step, partial(send, ranks, signals, to_group), nth)


def signal_in_generation(call: int, ranks: list[int], signals: Sequence[str]) -> None:
    """Inside the n-th `generate` of this rank."""
    from transformers import GenerationMixin

    calls = Counter[str]()

    def look(*_, **__) -> None:
        calls["generate"] += 1
        if calls["generate"] == call + 1:  # the first tries the evaluation before training
            send(ranks, signals)

    wrap(GenerationMixin, "_prepare_generation_config", look)


def signal_and_hold(name: str) -> None:
    """This process gets it, and what it was about to do waits, so that training goes on beside it."""
    send([this_rank()], [name])
    time.sleep(0.4)


def tell_saves() -> None:
    """Each rank says when it begins to save."""
    from toolkit.checkpoint.save import CheckpointWriter

    wrap(CheckpointWriter, "save", lambda _, state, **__: print(f"saving step {state.step}", flush=True))


def signals_until_the_end(signals: Sequence[str], every_s: float) -> None:
    """Every rank gets them again and again, from the first step on, until it has gone. A process of its own sends them."""
    from toolkit.distributed.signals import StopRequests

    def start(*_) -> None:
        pid = os.getpid()
        if os.fork() == 0:
            with suppress(ProcessLookupError):
                while os.getppid() == pid:
                    for name in signals:
                        time.sleep(every_s)
                        os.kill(pid, getattr(signal, name))
            os._exit(0)

    wrap(StopRequests, "__enter__", start)


def end_in_step(step: int, number: int) -> None:
    """Where all ranks have begun a step, rank 0 sends its launcher this signal, or, for 0, kills the process that
    `TOOLKIT_STARTED_BY` names, as `compare` does. All wait there until a signal is noted, or the launcher is gone (two minutes
    at most)."""
    from toolkit.distributed.comm import gather_objects
    from toolkit.distributed.signals import StopRequests, launcher_is_gone

    stops: list[StopRequests] = []
    wrap(StopRequests, "__enter__", stops.append)

    def end_and_wait() -> None:
        gather_objects(None)
        if this_rank() == 0:
            os.kill(os.getppid() if number else int(os.environ["TOOLKIT_STARTED_BY"]), number or signal.SIGKILL)
        give_up_at = time.monotonic() + 120
        while not stops[0].noted and not launcher_is_gone() and time.monotonic() < give_up_at:
            time.sleep(0.02)

    at_step(step, end_and_wait)


def outlive_launcher() -> None:
    """It is terminated before the ranks of a run meet, after the seconds in which libraries are imported."""
    from toolkit.launch import accelerator

    def end() -> None:
        launcher = os.getppid()
        os.kill(launcher, signal.SIGTERM)
        while os.getppid() == launcher:
            time.sleep(0.02)

    wrap(accelerator, "read_launch", end)


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
