"""`verify` with its runs on the fork server, and faults that are put into them from outside.

A fault is a function that every rank calls before the recipe is run: it patches the toolkit as a mistake in it would change it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.launch import start
from toolkit.verification.verify import verify


def run_verify(output: Path, run_arguments: list[str], fault: str = "none", **settings: Any) -> bool:
    """`verify` on 2 processes on the CPU, as the command would be called."""
    launch = partial(launch_planted, fault)
    return verify(run_arguments, use_cpu=True, num_processes=2, output=output, launch=launch, **settings)


def launch_planted(fault: str, preset: Path, command: list[str], log_path: Path) -> int:
    """As `launching.launch`, by the fork server and with a fault."""
    with start(__file__, [fault, *command], preset=preset) as running:
        result = running.wait()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(result.stdout + result.stderr)
    return next((code for code in result.returncodes if code), 0)


def none() -> None:
    """No fault."""


FAULTS: dict[str, Callable[[], None]] = {"none": none}

if __name__ == "__main__":
    planted, _, module, *arguments = sys.argv[1:]
    FAULTS[planted]()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
