"""Every GPU preset by the real launcher on the GPUs that there are: three steps, then a resume from the first.

`tests/recipes/test_presets.py` runs the same presets on CPUs. `fsdp1_hybrid_shard` and `fsdp2_fp8` have files of their own here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.needs import needs_gpus
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, write_accelerate_yaml
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import RECIPES, Workbench, new_bench
from toolkit.launch.accelerate_yaml import check_accelerate_yaml

NUM_GPUS = torch.cuda.device_count()
ON_ONE_MACHINE: dict[str, Any] = {"num_machines": 1, "main_process_ip": None, "main_process_port": 0}
AS_MANY_AS_THERE_ARE: dict[str, Any] = {**ON_ONE_MACHINE, "num_processes": NUM_GPUS}
MESHES = sorted(name for name, on_cpu in GPU_PRESET_OVERRIDES_ON_CPU.items() if "parallelism_config" in on_cpu)
"""Presets of replicas and shards: two of each, as on CPUs."""
RELATIVE_TOLERANCE = 2e-2
"""Of a loss in bf16, whose kernels add in no fixed order."""
TIMEOUT_S = 300
"""Of one launch: compiling takes a minute or more."""

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return new_bench(tmp_path_factory, "presets-on-gpus")


@needs_gpus(1)
def test_single_trains_and_resumes(bench: Workbench) -> None:
    train_and_resume(bench, "single", {})


@needs_gpus(2)
@pytest.mark.parametrize("preset", sorted({*GPU_PRESET_OVERRIDES_ON_CPU} - {*MESHES}))
def test_preset_trains_and_resumes(bench: Workbench, preset: str) -> None:
    train_and_resume(bench, preset, AS_MANY_AS_THERE_ARE)


@needs_gpus(4)
@pytest.mark.parametrize("preset", MESHES)
def test_mesh_trains_and_resumes(bench: Workbench, preset: str) -> None:
    train_and_resume(bench, preset, two_by_two(preset))


@pytest.mark.parametrize("preset", sorted(GPU_PRESET_OVERRIDES_ON_CPU))
def test_what_is_changed_for_the_gpus_makes_a_preset_that_is_not_refused(preset: str, tmp_path: Path) -> None:
    """Needs no GPU."""
    changes = two_by_two(preset) if preset in MESHES else {**AS_MANY_AS_THERE_ARE, "num_processes": 2}
    path, _ = write_accelerate_yaml(tmp_path, preset, changes)
    assert check_accelerate_yaml(path)["num_processes"] == changes["num_processes"]


def two_by_two(preset: str) -> dict[str, Any]:
    """What changes of a preset of replicas and shards."""
    return ON_ONE_MACHINE | {key: GPU_PRESET_OVERRIDES_ON_CPU[preset][key] for key in ("num_processes", "parallelism_config")}


def train_and_resume(bench: Workbench, preset: str, overrides: dict[str, Any]) -> None:
    """By `accelerate launch` on the preset with `overrides`."""
    changes: dict[str, Any] = {"checkpoint__every_steps": 1, "checkpoint__keep_last": 9, "train__micro_batch_size_rows": 2}
    printed = launch(bench, preset, preset, overrides, changes)
    assert f" rows: {overrides.get('num_processes', 1)} process" in printed
    resumed = f"{preset}-resumed"
    later = shutil.ignore_patterns("step-00000002", "step-00000003", "export")
    shutil.copytree(bench.runs / preset, bench.runs / resumed, ignore=later)
    assert "after step 1\n" in launch(bench, resumed, preset, overrides, changes)
    whole, again = (bench.lines(name, "train") for name in (preset, resumed))
    assert [line["step"] for line in again] == [line["step"] for line in whole] == [1, 2, 3]
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in whole], rel=RELATIVE_TOLERANCE)
    assert again[1]["step_time_s"] != whole[1]["step_time_s"], "step 2 did not run again"
    assert (bench.runs / resumed / "export" / "model.safetensors").is_file()


def launch(bench: Workbench, name: str, preset: str, overrides: dict[str, Any], changes: dict[str, Any]) -> str:
    """Run `name` to its good end; returns what was printed."""
    argv = bench.flags(name, **changes)
    launcher = accelerate_launch(RECIPES / f"{bench.recipe}.py", argv, folder=bench.runs, preset=preset, overrides=overrides)
    printed = finish(launcher, TIMEOUT_S)
    assert launcher.returncode == 0, printed[-8000:]
    return printed
