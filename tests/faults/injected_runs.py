"""Runs of a recipe on any preset with the faults of `injected_recipe` in them, and what they must come to."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.faults.workers import injected_recipe
from tests.recipes.runs import FP32, Workbench
from tests.recipes.test_resume import curves
from tests.support.launch import LaunchResult, Running, run_on_ranks, start
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, build_model_folders, make_rows, save_jsonl

SCRIPT = Path(injected_recipe.__file__)
Fault = tuple[str, dict[str, Any]]
"""Name of a function in `injected_recipe`, and its settings."""


def new_bench(factory: pytest.TempPathFactory, name: str, recipe: str = "t5") -> Workbench:
    """A place for the runs of one file of tests."""
    inputs = _inputs(factory.getbasetemp())
    rows = {"t5": "rows.jsonl", "llm": "prompts.jsonl"}[recipe]
    models = {family: inputs / family for family in ("t5", "llama")}
    return Workbench(factory.mktemp(name), models, data=inputs, recipe=recipe, rows=rows)


@functools.cache
def _inputs(parent: Path) -> Path:
    """Two model folders and 60 rows for each recipe, made once a test run."""
    folder = parent / "faulty-inputs"
    folder.mkdir()
    run_on_ranks(_build_models, preset="single", overrides=FP32, args=(folder,))
    rows = make_rows(60)
    save_jsonl(folder / "rows.jsonl", rows)
    save_jsonl(folder / "prompts.jsonl", [{"prompt": row["source"], "completion": " " + row["target"]} for row in rows])
    return folder


def _build_models(parent: Path) -> None:
    t5, llama = {"t5": FAMILIES["t5"]}, {"llama": CAUSAL_FAMILIES["llama"]}
    with patch.dict(FAMILIES, t5, clear=True), patch.dict(CAUSAL_FAMILIES, llama, clear=True):
        build_model_folders(parent)


def start_with(
    bench: Workbench,
    name: str,
    *faults: Fault,
    preset: str = "fsdp2_cpu",
    overrides: dict[str, Any] | None = None,
    exports: bool = False,
    num_processes: int | None = None,
    **changes: Any,
) -> Running:
    """Start run `name` with faults in it; use it in a `with`. Training is all it does, unless it `exports`."""
    argv = arguments(bench, name, *faults, exports=exports, **changes)
    overrides = FP32 if overrides is None else overrides
    return start(SCRIPT, argv, preset=preset, overrides=overrides, num_processes=num_processes)


def arguments(bench: Workbench, name: str, *faults: Fault, exports: bool = False, **changes: Any) -> list[str]:
    """Of `SCRIPT`, as every rank gets them."""
    every: list[Fault] = [*faults, *([] if exports else [("no_export", {})])]
    return [json.dumps(every), bench.recipe, *bench.flags(name, **changes)]


def attempt_with(bench: Workbench, name: str, *faults: Fault, timeout_s: float = 120, **changes: Any) -> LaunchResult:
    """Run to the end, good or bad."""
    with start_with(bench, name, *faults, **changes) as running:
        return running.wait(timeout_s)


def run_with(bench: Workbench, name: str, *faults: Fault, **changes: Any) -> str:
    """Run to a good end; returns what it printed."""
    with start_with(bench, name, *faults, **changes) as running:
        result = running.wait()
        assert not any(result.returncodes), running.last_words()
        return result.stdout


def check_same(bench: Workbench, name: str, whole: str, step: int) -> None:
    """A run's curves, evaluations, rows and last checkpoint are those of another one, bit for bit, and none is there twice."""
    for kind, of_line in (("train", curves), ("eval", figures_of_evaluation), ("skip", dict)):
        assert list(map(of_line, bench.lines(name, kind))) == list(map(of_line, bench.lines(whole, kind))), kind
    for path in sorted((bench.runs / whole).glob("rows-*.jsonl")):
        assert (bench.runs / name / path.name).read_text() == path.read_text(), "rows were lost or taken twice"
    assert tensors_and_state(bench, name, step) == tensors_and_state(bench, whole, step)


def figures_of_evaluation(line: dict[str, Any]) -> dict[str, Any]:
    """All but the time it took."""
    return {key: value for key, value in line.items() if key != "rows_per_s"}


def tensors_and_state(bench: Workbench, name: str, step: int) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Hashes of a checkpoint's shards (weights and moments) and random states, and what its manifest says of the run."""
    folder = bench.runs / name / "checkpoints" / f"step-{step:08d}"
    files = [*folder.glob("state/*.distcp"), *folder.glob("rng-*.safetensors")]
    assert files, folder
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    manifest = read_manifest(bench, name, step)
    return hashes, manifest["state"], figures_of_evaluation(manifest["metrics"])


def read_manifest(bench: Workbench, name: str, step: int) -> dict[str, Any]:
    """As it stands."""
    return json.loads((bench.runs / name / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
