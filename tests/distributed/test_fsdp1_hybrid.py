"""FSDP1's hybrid sharding on 4 CPU processes, as on 2 machines of 2 GPUs.

torch forms the shards by the number of devices it sees in a machine, and takes the CPU for one: nothing is sharded, which is why
the preset is refused there. With two it does what it does on GPUs, so all but nccl is tried here. What the GPUs add is
`tests/gpu/test_hybrid_shard.py`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.distributed.test_invariants import report_shards
from tests.support import small_run
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import Finished, check_curve, check_gradients, run_recipes
from tests.support.workbench import FP32

PRESET = "fsdp1_hybrid_shard"
AS_TWO_MACHINES = {
    **GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_shard_grad_op"],
    "num_machines": 1, "main_process_ip": None, "main_process_port": 0, "num_processes": 4,
}  # fmt: skip


def with_two_devices(function: Callable, *args):
    """On every rank: `function`, where torch sees two devices in a machine and the YAML is not refused."""
    with (
        patch.object(torch.cpu, "device_count", lambda: 2),
        patch("toolkit.launch.accelerate_rules._check_fsdp1", lambda *_, **__: None),
    ):
        return function(*args)


def test_each_machine_holds_the_whole_and_each_of_its_ranks_a_half():
    check_shards(partial(with_two_devices, report_shards), PRESET, AS_TWO_MACHINES)


def check_shards(report: Callable, preset: str, where: dict) -> None:
    """What four ranks report that hold a T5."""
    reports = run_on_ranks(report, preset=preset, overrides=FP32 | where)
    assert len(reports) == 4
    for report in reports:
        whole_bytes = report["whole_bytes"]
        assert report["local_bytes"] == pytest.approx(whole_bytes / 2, rel=0.02)
        assert report["moment_bytes"] == pytest.approx(whole_bytes, rel=0.02)
        assert report["whole_gathered_bytes"] == whole_bytes


def test_it_trains_as_one_process(tmp_path):
    """A resume under FSDP1: `tests/recipes/test_resume.py`; from other strategies: `tests/faults/test_elastic.py`."""
    (hybrid, gradients), (single, expected) = train_both(tmp_path, with_two_devices, PRESET, AS_TWO_MACHINES)
    check_curve(hybrid, single)
    check_gradients(gradients, expected[0])


def train_both(folder: Path, around: Callable, preset: str, where: dict) -> tuple[Finished, Finished]:
    """A T5 on four ranks, each with something around it, and on one process."""
    small_run.write_inputs(folder)
    function = partial(around, small_run.train_and_record_gradients)
    flags = [f"--model.name_or_path={folder / 'model'}", "--model.from_scratch=true", "--train.micro_batch_size_rows=2"]
    flags.append("--eval.generate=false")
    hybrid = {"preset": preset, "overrides": where, "function": function, "flags": flags}
    runs = run_recipes(folder, {"hybrid": hybrid, "single": {"preset": "single", "overrides": {}, "flags": flags}})
    return runs["hybrid"], runs["single"]
