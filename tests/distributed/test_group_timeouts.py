"""Every process group of a run follows `run.timeout_s`, those too that torch creates with a limit of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_fsdp1_hybrid import AS_TWO_MACHINES, with_two_devices
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from toolkit.distributed.comm import CONTROL_TIMEOUT

TIMEOUT_S = 77.0


def list_timeouts() -> dict[str, float]:
    """On every rank: the groups that this rank is in after one training step, each with its timeout in seconds."""
    import torch
    import torch.distributed as dist
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.distributed.comm import build_group
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.wrap import shard_model

    accelerator = build_accelerator(TIMEOUT_S)
    sharded = shard_model(accelerator, T5ForConditionalGeneration(T5Config(**T5_CONFIG)))
    build_group()
    ids = torch.arange(8).reshape(2, 4)
    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    cpu = torch.device("cpu")
    return {g.group_name: g._get_backend(cpu).options._timeout.total_seconds() for g in groups}  # type: ignore[attr-defined]


def list_timeouts_with_two_devices() -> dict[str, float]:
    found: dict[str, float] = with_two_devices(list_timeouts)
    return found


@pytest.mark.parametrize(
    ("preset", "overrides", "function"),
    [
        ("fsdp2_hsdp", GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"], list_timeouts),
        ("fsdp1_hybrid_shard", AS_TWO_MACHINES, list_timeouts_with_two_devices),
    ],
)
def test_every_group_follows_the_runs_timeout(preset: str, overrides: dict[str, Any], function: Any) -> None:
    for timeouts_s in run_on_ranks(function, preset=preset, overrides=overrides):
        # The control group and the checkpoint thread's wait for days by design.
        of_the_run = [seconds for seconds in timeouts_s.values() if seconds != CONTROL_TIMEOUT.total_seconds()]
        assert len(of_the_run) == len(timeouts_s) - 2, timeouts_s
        assert len(of_the_run) >= 3 and set(of_the_run) == {2 * TIMEOUT_S}, timeouts_s  # all ranks, shards, replicas
