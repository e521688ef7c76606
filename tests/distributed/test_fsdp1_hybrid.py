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


def test_it_trains_as_one_process_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From checkpoints of other strategies: `tests/faults/test_elastic.py`."""
    write_inputs(tmp_path)
    flags = [
        *("--model.name_or_path", str(tmp_path / "model"), "--model.from_scratch", "true"),
        *("--train.micro_batch_size_rows", "2", "--checkpoint.every_steps", str(SAVED_STEP), "--eval.generate", "false"),
    ]
    how: dict[str, Any] = {"preset": "fsdp1_hybrid_shard", "overrides": AS_TWO_MACHINES, "function": train_with_two_devices}
    single: dict[str, Any] = {"preset": "single", "overrides": {}}
    runs = run_recipes(tmp_path, {"hybrid": how | {"flags": flags}, "single": single | {"flags": flags}})
    check_gradients(runs["hybrid"][1], runs["single"][1][0])
    # As if all ranks had died in the step after the saved one.
    later = shutil.ignore_patterns(f"step-{NUM_STEPS:08d}", "export")
    whole, resumed = (tmp_path / "runs" / name for name in ("hybrid", "resumed"))
    shutil.copytree(whole, resumed, ignore=later)
    runs |= run_recipes(tmp_path, {"resumed": how | {"flags": flags}})
    own, first = (figures(runs[name][0], "train")["step_time_s"] for name in ("resumed", "hybrid"))
    assert (own[:SAVED_STEP] == first[:SAVED_STEP]).all() and (own[SAVED_STEP:] != first[SAVED_STEP:]).all(), "not resumed"
    for lines, _ in runs.values():
        check_curve(lines, runs["single"][0])
    weights = [exported_weights(run) for run in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 10
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])


def exported_weights(run: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    weights: dict[str, np.ndarray] = load_file(run / "export" / "model.safetensors")
    return weights
