"""Run `verify` with its runs on the fork server, and with a fault planted in it and in them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from tests.launch import start
from tests.planting.plant import planted
from toolkit.verification.verify import verify


def run_verify(
    output: Path, run_arguments: list[str], fault: str = "none", *, only_in_ranks: bool = False, **settings: Any
) -> bool:
    """`verify` on 2 processes on the CPU, as the command would be called."""
    with planted(fault, only_in_ranks=only_in_ranks):
        return verify(run_arguments, use_cpu=True, num_processes=2, output=output, launch=launch, **settings)


def launch(preset: Path, command: list[str], log_path: Path) -> int:
    """As `launching.launch`, by the fork server."""
    with start(__file__, command, preset=preset) as running:
        result = running.wait()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(result.stdout + result.stderr)
    return next((code for code in result.returncodes if code), 0)


if __name__ == "__main__":
    _, module, *arguments = sys.argv[1:]  # `-m MODULE ARGUMENT...`
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
