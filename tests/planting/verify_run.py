"""Run `verify`, or the part of it that holds a check, with its runs on the fork server and a fault planted in it and in them."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.planting.plant import planted
from tests.support.launch import start
from toolkit.tools.verify.checks import compare_evaluations
from toolkit.tools.verify.records import Proof, prove
from toolkit.tools.verify.runs import Box, WatchedRun, launch_all, plan_runs
from toolkit.tools.verify.verify import DEFAULT_TOLERANCE, build_box, verify

RUNS_OF_CHECK = {
    "update": ["preset-0"],
    "dropout": ["dropout"],
    "evaluation": ["reference", "preset-0"],
    "generation": ["preset-0"],
    "adapter": ["preset-0"],
}
"""Checks that need a run or two of the six."""


def run_verify(
    output: Path, run_arguments: list[str], fault: str = "none", *, only_in_ranks: bool = False, **settings: Any
) -> bool:
    """`verify` on 2 processes on the CPU, as the command would be called."""
    with planted(fault, only_in_ranks=only_in_ranks):
        return verify(run_arguments, use_cpu=True, num_processes=2, output=output, launch=launch, **settings)


def run_part(
    check: str, output: Path, run_arguments: list[str], fault: str, *, model: str, only_in_ranks: bool = False
) -> list[Proof]:
    """The rows that one of `RUNS_OF_CHECK` gives, and those of the exports beside `generation` and `adapter`."""
    with planted(fault, only_in_ranks=only_in_ranks):
        box = build_box(run_arguments, model=model, num_processes=2, use_cpu=True, output=output)
        plans = plan_runs(box)
        runs = list(launch_all(box, {name: plans[name] for name in RUNS_OF_CHECK[check]}, launch))
        assert [run.failure for run in runs if run.failure] == []
        return _prove(check, box, runs)


def _prove(check: str, box: Box, runs: list[WatchedRun]) -> list[Proof]:
    from toolkit.tools.verify.exports import check_exports
    from toolkit.tools.verify.updates import check_dropout, check_updates

    if check in ("generation", "adapter"):
        return check_exports(runs[0], box.config)
    work = {
        "update": partial(check_updates, config=box.config.optim),
        "dropout": check_dropout,
        "evaluation": partial(compare_evaluations, runs[0], tolerance=DEFAULT_TOLERANCE),
    }
    proof = prove(check, runs[-1], work[check])
    return [proof] if proof else []


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
