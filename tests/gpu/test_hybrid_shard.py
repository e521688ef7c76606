"""FSDP1's hybrid sharding over nccl on 4 GPUs of one machine, two of which each rank sees: torch takes these for its machine.

On CPU it silently shards nothing and is refused; `tests/distributed/test_fsdp1_hybrid.py` tries the rest of it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_invariants import report_shards
from tests.gpu.needs import needs_gpus
from tests.support.launch import run_on_ranks
from tests.support.small_run import figures, run_recipe, train_and_record_gradients, write_inputs

AS_TWO_MACHINES: dict[str, Any] = {"num_machines": 1, "main_process_ip": None, "main_process_port": 0, "num_processes": 4}
RELATIVE_TOLERANCE = 1e-4  # fp32; cuBLAS chooses other kernels for other batch shapes


def on_two_gpus_a_machine(function: Callable[..., Any], *args: Any) -> Any:
    """On every rank, before CUDA starts: see the GPUs of its machine only."""
    rank = int(os.environ["RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1" if rank < 2 else "2,3"
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank % 2), "2"
    return function(*args)


def train_on_two_machines(*args: Any) -> dict[str, np.ndarray]:
    gradients: dict[str, np.ndarray] = on_two_gpus_a_machine(train_and_record_gradients, *args)
    return gradients


def report_on_two_machines() -> dict[str, Any]:
    report: dict[str, Any] = on_two_gpus_a_machine(report_shards)
    return report


@needs_gpus(4)
def test_each_machine_holds_the_whole_and_each_of_its_ranks_a_half() -> None:
    overrides = {"mixed_precision": "no", **AS_TWO_MACHINES}
    for report in run_on_ranks(report_on_two_machines, preset="fsdp1_hybrid_shard", overrides=overrides):
        assert report["local_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["whole_gathered_bytes"] == report["whole_bytes"]


@needs_gpus(4)
def test_it_trains_as_one_gpu(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    flags = [f"--model.name_or_path={tmp_path / 'model'}", "--model.from_scratch=true", "--train.micro_batch_size_rows=2"]
    single = run_recipe(tmp_path, "single", preset="single", overrides={}, flags=flags)[0]
    hybrid = run_recipe(
        tmp_path, "hybrid", preset="fsdp1_hybrid_shard", overrides=AS_TWO_MACHINES, flags=flags, function=train_on_two_machines
    )[0]
    expected, actual = figures(single, "train"), figures(hybrid, "train")
    for figure in ("loss", "grad_norm"):
        np.testing.assert_allclose(actual[figure], expected[figure], rtol=RELATIVE_TOLERANCE, err_msg=figure)
