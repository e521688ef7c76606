"""Lengths in epochs, the warm-up as a ratio and label smoothing, in runs on 2 processes, on one, and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_resume import CURVES
from tests.support.checkpoint_files import change_manifest
from tests.support.workbench import Workbench

# 52 training rows in steps of 8: an epoch has 7 steps.
CHANGES: dict[str, Any] = {
    "model__dropout": 0,
    "train__max_steps": None,
    "train__num_epochs": 1.5,
    "train__micro_batch_size_rows": 2,
    "optim__warmup_ratio": 0.25,
    "optim__label_smoothing": 0.1,
    "eval__every_epochs": 0.5,
    "eval__generate": False,
    "checkpoint__every_epochs": 0.75,
    "checkpoint__keep_last": 9,
}
NUM_STEPS, WARMUP_STEPS, EVALUATED, SAVED = 11, 3, [4, 7, 11], [6, 11]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], data_folder: Path) -> Workbench:
    """The bench with a finished run `two` of 2 processes on it, and what it printed in `two.txt`."""
    bench = Workbench(runs=tmp_path_factory.mktemp("schedules"), models=model_folders, data=data_folder, changes=CHANGES)
    (bench.runs / "two.txt").write_text(bench.run("two"))
    return bench


def test_a_run_has_the_steps_of_its_epochs(bench: Workbench) -> None:
    printed, train = (bench.runs / "two.txt").read_text(), bench.lines("two", "train")
    assert f"\nsteps       {NUM_STEPS}, 7 an epoch, " in printed
    assert "the training loss has label smoothing 0.1, the evaluation's has none\n" in printed
    assert [line["step"] for line in bench.lines("two", "eval")] == EVALUATED
    assert [line["step"] for line in bench.lines("two", "checkpoint")] == SAVED
    rates = [line["learning_rate"] for line in train]
    assert len(rates) == NUM_STEPS and rates.index(max(rates)) == WARMUP_STEPS - 1


def test_one_process_has_the_same_smoothed_curve(bench: Workbench) -> None:
    bench.run("one", preset="single", optim__warmup_ratio=0, optim__warmup_steps=WARMUP_STEPS)
    bench.run("plain", preset="single", optim__label_smoothing=0, train__num_epochs=0.1)
    for kind in ("train", "eval"):
        one, two = ([line["loss"] for line in bench.lines(name, kind)] for name in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-5)
    assert bench.lines("plain", "train")[0]["loss"] != pytest.approx(bench.lines("one", "train")[0]["loss"], rel=1e-4)


@pytest.mark.parametrize(("preset", "tolerance"), [("fsdp2_cpu", 0), ("single", 1e-5)])
def test_a_resumed_run_evaluates_and_saves_at_the_same_steps(bench: Workbench, preset: str, tolerance: float) -> None:
    shutil.copytree(bench.runs / "two", bench.runs / preset, ignore=shutil.ignore_patterns("step-00000011", "export"))
    # As an older version wrote it: whole epochs, and none of the keys that change nothing.
    config = json.loads((bench.checkpoint(preset, 6) / "manifest.json").read_text())["identity"]["config"]
    config |= {"train.num_epochs": 2}
    del config["optim.warmup_steps"], config["eval.every_epochs"]
    change_manifest(bench.checkpoint(preset, 6), lambda manifest: manifest["identity"].update(config=config))
    printed = bench.run(preset, preset=preset)
    assert "step-00000006, after step 6\n" in printed
    [resumed_at] = bench.lines(preset, "resume")
    assert (resumed_at["step"], resumed_at["num_processes"]) == (6, 1 if preset == "single" else 2)
    assert "the learning rate drops to" in printed and "schedule now ends with step 11, before with step 14" in printed
    assert [line["step"] for line in bench.lines(preset, "eval")] == EVALUATED
    assert [line["step"] for line in bench.lines(preset, "checkpoint")] == SAVED
    for figure in CURVES:
        resumed, whole = ([line[figure] for line in bench.lines(name, "train")] for name in (preset, "two"))
        assert resumed == pytest.approx(whole, rel=tolerance, abs=0), figure
