"""FSDP1's hybrid sharding on 4 CPU processes, as on 2 machines of 2 GPUs.

torch forms the shards by the number of devices it sees in a machine, and takes the CPU for one: nothing is sharded, which is why
the preset is refused there. With two it does what it does on GPUs, so all but nccl is tried here. What the GPUs add is
`tests/gpu/test_hybrid_shard.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.distributed.test_invariants import report_shards
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import (
    NUM_STEPS,
    check_curve,
    check_gradients,
    figures,
    run_recipes,
    train_and_record_gradients,
    write_inputs,
)

AS_TWO_MACHINES: dict[str, Any] = {
    **GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_shard_grad_op"],
    "num_machines": 1, "main_process_ip": None, "main_process_port": 0, "num_processes": 4,
}  # fmt: skip
SAVED_STEP = 3
RESUMED = [("single", "hybrid"), ("hybrid", "hybrid")]
"""Whose checkpoint, and where a run goes on from it."""


def with_two_devices(function: Callable[..., Any], *args: Any) -> Any:
    """On every rank: `function`, where torch sees two devices in a machine and the YAML is not refused."""
    import torch

    with (
        patch.object(torch.cpu, "device_count", lambda: 2),
        patch("toolkit.launch.accelerate_rules._check_fsdp1", lambda *_, **__: None),
    ):
        return function(*args)


def train_with_two_devices(*args: Any) -> dict[str, np.ndarray]:
    gradients: dict[str, np.ndarray] = with_two_devices(train_and_record_gradients, *args)
    return gradients


def report_with_two_devices() -> dict[str, Any]:
    report: dict[str, Any] = with_two_devices(report_shards)
    return report


def test_each_machine_holds_the_whole_and_each_of_its_ranks_a_half() -> None:
    overrides = {"mixed_precision": "no", **AS_TWO_MACHINES}
    reports = run_on_ranks(report_with_two_devices, preset="fsdp1_hybrid_shard", overrides=overrides)
    whole_bytes = reports[0]["whole_bytes"]
    assert len(reports) == 4
    for machine in (reports[:2], reports[2:]):
        assert sum(report["local_bytes"] for report in machine) == pytest.approx(whole_bytes, rel=0.02)
    for report in reports:
        assert report["local_bytes"] == pytest.approx(whole_bytes / 2, rel=0.02)
        assert report["moment_bytes"] == pytest.approx(whole_bytes, rel=0.02)
        assert report["whole_gathered_bytes"] == whole_bytes


def test_it_trains_as_one_process_and_its_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    flags = [
        *("--model.name_or_path", str(tmp_path / "model"), "--model.from_scratch", "true"),
        *("--train.micro_batch_size_rows", "2", "--checkpoint.every_steps", str(SAVED_STEP), "--eval.generate", "false"),
    ]
    where: dict[str, dict[str, Any]] = {
        "hybrid": {"preset": "fsdp1_hybrid_shard", "overrides": AS_TWO_MACHINES, "function": train_with_two_devices},
        "single": {"preset": "single", "overrides": {}},
    }
    runs = run_recipes(tmp_path, {name: {"flags": flags, **how} for name, how in where.items()})
    check_gradients(runs["hybrid"][1], runs["single"][1][0])
    # Each run goes on from the other's checkpoint, and from its own.
    resumed = {f"{source}-to-{target}": (source, target) for source, target in RESUMED}
    for name, (source, _) in resumed.items():
        copy_until_saved_step(tmp_path / "runs" / source, tmp_path / "runs" / name)
    runs |= run_recipes(tmp_path, {name: {"flags": flags, **where[target]} for name, (_, target) in resumed.items()})
    for name, (source, _) in resumed.items():
        own, whole = (figures(runs[run][0], "train")["step_time_s"] for run in (name, source))
        assert (own[:SAVED_STEP] == whole[:SAVED_STEP]).all() and (own[SAVED_STEP:] != whole[SAVED_STEP:]).all(), "not resumed"
    for lines, _ in runs.values():
        check_curve(lines, runs["single"][0])
    weights = [exported_weights(tmp_path / "runs" / name) for name in ("hybrid", "hybrid-to-hybrid")]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 10
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])


def copy_until_saved_step(source: Path, target: Path) -> None:
    """As if all ranks had died in the step after the saved one."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"step-{NUM_STEPS:08d}", "export"))


def exported_weights(run: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    weights: dict[str, np.ndarray] = load_file(run / "export" / "model.safetensors")
    return weights
