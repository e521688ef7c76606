"""Every preset and every run YAML of the repository trains a tiny T5 to its export."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch import GPU_PRESET_OVERRIDES_ON_CPU, REPOSITORY
from tests.model_folders import make_rows, save_wikihow_csv
from tests.recipes.runs import Workbench

PRESETS: dict[str, int] = {
    "single": 1,
    "ddp_cpu": 2,
    "fsdp2_cpu": 2,
    "ddp": 2,
    "fsdp2_full_shard": 2,
    "fsdp2_shard_grad_op": 2,
    "fsdp2_activation_checkpointing": 2,
    "fsdp2_compile": 2,
    "fsdp2_offload": 2,
    "fsdp1_full_shard": 2,
}
"""Processes on CPU, by preset; each runs in its own precision."""

RESUMED = ("ddp_cpu", "fsdp2_offload", "fsdp1_full_shard")
"""Presets whose checkpoints are read back: each has a way of its own to hold parameters and moments."""

RUN_CONFIGS = ["t5_docstrings", "t5_wikihow"]
"""Each has a test below that runs it, made small by flags."""


def test_every_preset_is_here() -> None:
    assert sorted(PRESETS) == sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))


def test_every_run_config_is_here() -> None:
    assert sorted(RUN_CONFIGS) == sorted(path.stem for path in (REPOSITORY / "recipes" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_evaluates_saves_and_exports(workbench: Workbench, preset: str) -> None:
    on_cpu = GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {})
    printed = workbench.run("run", preset=preset, overrides=on_cpu, checkpoint__every_steps=1, checkpoint__keep_last=9)
    assert f"on each of {PRESETS[preset]} processes" in printed
    check_whole_run(workbench)
    assert workbench.checkpoints("run") == [f"step-0000000{step}" for step in (1, 2, 3)]
    if preset in RESUMED:
        later = shutil.ignore_patterns("step-00000002", "step-00000003")
        shutil.copytree(workbench.runs / "run", workbench.runs / "resumed", ignore=later)
        assert "after step 1\n" in workbench.run("resumed", preset=preset, overrides=on_cpu)
        whole, resumed = (workbench.lines(name, "train") for name in ("run", "resumed"))
        # Step 2 shows the weights that were read back, step 3 the moments that step 2 used.
        for figure in ("loss", "grad_norm"):
            assert [line[figure] for line in resumed] == [line[figure] for line in whole]
        assert resumed[1]["step_time_s"] != whole[1]["step_time_s"], "step 2 did not run again"


def test_docstrings_config_trains_its_model_and_a_tokenizer(workbench: Workbench) -> None:
    """On other rows: reading the docstrings of everything installed takes longer than all of this file."""
    config = REPOSITORY / "recipes" / "configs" / "t5_docstrings.yaml"
    model = REPOSITORY / yaml.safe_load(config.read_text())["model"]["name_or_path"]
    workbench.run("run", config=config, model=model, optim__warmup_steps=1)
    check_whole_run(workbench)


def test_accelerate_launch_trains_on_a_wikihow_file(workbench: Workbench, tmp_path: Path) -> None:
    """The command of the README, as a user types it, with flags that make it small."""
    file = save_wikihow_csv(tmp_path / "wikihowAll.csv", make_rows(60))
    config = REPOSITORY / "recipes" / "configs" / "t5_wikihow.yaml"
    small = {"data__source": "wikihow", "data__files": file, "train__num_epochs": None, "optim__warmup_steps": 1}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml")),
            *(str(REPOSITORY / "recipes" / "t5.py"), "--config", str(config)),
            *workbench.flags("run", **small),
        ],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)},  # this checkout, installed or not
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "with an empty text" in done.stdout
    check_whole_run(workbench)


def check_whole_run(workbench: Workbench) -> None:
    """Three steps, an evaluation with generation, a checkpoint and an export."""
    assert [line["step"] for line in workbench.lines("run", "train")] == [1, 2, 3]
    evaluations = workbench.lines("run", "eval")
    assert [line["step"] for line in evaluations] == [3]
    assert evaluations[0]["num_rows"] == 3 and evaluations[0]["rougeL"] >= 0
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= {
        path.name for path in (workbench.runs / "run" / "export").iterdir()
    }
