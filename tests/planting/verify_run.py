"""Run `verify`, or those of its runs that a check needs, by the tests' server and with a fault planted in it and in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.planting.plant import planted
from tests.support.launch import Running
from tests.support.rank import run_script
from toolkit.tools.verify.records import Proof
from toolkit.tools.verify.runs import launch_all, plan_runs
from toolkit.tools.verify.verify import DEFAULT_TOLERANCE, build_box, compare, verify

BESIDE_ONE_PROCESS, RESUMED = {"reference", "preset-0"}, {"dropout", "resumed", "resumed-again", "ddp-dropout"}
RUNS_OF_CHECK: dict[str, set[str]] = {
    **dict.fromkeys(("start", "loss", "gradients", "evaluation", "positions", "buffers", "run"), BESIDE_ONE_PROCESS),
    **dict.fromkeys(("save", "resume"), RESUMED),
    "text": {"reference"},
    "modes": {"ddp"},
    "dropout": {"dropout"},
    "recomputation": {"dropout", "kept-0"},
}
"""Those of the eight or more that show whether a check passes; `preset-0` for the others."""


def run_verify(output: Path, run_arguments: list[str], fault: str = "none", **settings: Any) -> bool:
    """`verify` on 2 processes on the CPU, as the command would be called."""
    with planted(fault):
        return verify(run_arguments, use_cpu=True, num_processes=2, output=output, launch=launch, **settings)


def run_part(
    names: Iterable[str],
    output: Path,
    run_arguments: list[str],
    fault: str = "none",
    *,
    only_in_ranks: bool = False,
    **settings: Any,
) -> list[Proof]:
    """The rows of all checks that these runs reach; settings are those of `build_box`."""
    with planted(fault, only_in_ranks=only_in_ranks):
        box = build_box(run_arguments, use_cpu=True, output=output, **{"num_processes": 2} | settings)
        plans = plan_runs(box)
        runs = {name: replace(plan, failure="") for name, plan in plans.items()}
        launched = launch_all(box, {name: plan for name, plan in plans.items() if name in names}, launch, launch)
        runs |= {run.name: run for run in launched}
        proofs = compare(box, runs, DEFAULT_TOLERANCE)
    return [proof for proof in proofs if proof.is_reached]


def launch(preset: Path, command: list[str], log_path: Path) -> int:
    """As `forks.launch`, by the tests' server."""
    with Running(lambda _: partial(run_script, command), preset=preset) as running:
        result = running.wait()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(result.stdout + result.stderr)
    return next((code for code in result.returncodes if code), 0)
