"""What a step reduces once for all its micro-batches, as gradients between HSDP's replicas; and the groups that it uses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_fsdp1_hybrid import AS_TWO_MACHINES, with_two_devices
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from toolkit.distributed.comm import CONTROL_TIMEOUT

TIMEOUT_S = 77.0
NUM_MICRO_BATCHES = 3


def count_collectives(wraps: bool) -> dict[str, Any]:
    """On every rank: two steps of several micro-batches; the collectives of the second, and the norm of its gradient."""
    import contextlib
    from collections import Counter
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.wrap import accumulating, shard_model
    from toolkit.training.optim import clip_gradients

    torch.manual_seed(0)
    sharded = shard_model(build_accelerator(), T5ForConditionalGeneration(T5Config(**{**T5_CONFIG, "dropout_rate": 0.0})))
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return patch.object(dist, name, call)

    for _ in range(2):
        counts.clear()
        sharded.model.zero_grad()
        with counting("all_reduce"), counting("reduce_scatter_single"), counting("all_gather_single"):
            for number in range(NUM_MICRO_BATCHES):
                ids = torch.arange(8).reshape(2, 4) + 10 * number + dist.get_rank()
                is_last = number == NUM_MICRO_BATCHES - 1
                with accumulating(sharded, is_last=is_last) if wraps else contextlib.nullcontext():
                    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    gradients = [p.grad.to_local() for p in sharded.model.parameters() if isinstance(p.grad, DTensor)]
    assert len(gradients) > 10
    local_sums = [gradient.double().sum().item() for gradient in gradients]
    return {**counts, "local_sums": local_sums, "norm": clip_gradients(sharded.model, None).item()}


@pytest.mark.parametrize(
    ("preset", "once", "times"),
    [("fsdp2_hsdp", "all_reduce", NUM_MICRO_BATCHES), ("fsdp2_shard_grad_op", "all_gather_single", NUM_MICRO_BATCHES)],
)
def test_a_step_communicates_once_what_it_can(preset: str, once: str, times: int) -> None:
    overrides = {**GPU_PRESET_OVERRIDES_ON_CPU[preset], "mixed_precision": "no"}
    plain, wrapped = (
        run_on_ranks(count_collectives, preset=preset, overrides=overrides, args=(wraps,)) for wraps in (False, True)
    )
    for before, after in zip(plain, wrapped, strict=True):
        assert before[once] == times * after[once] > 0, (before, after)
        assert before["reduce_scatter_single"] == after["reduce_scatter_single"] > 0
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-5)
        assert after["local_sums"] == pytest.approx(before["local_sums"], rel=1e-4, abs=1e-4)


def look_at_groups() -> dict[str, Any]:
    """On every rank: 10 to the power of the rank, summed over the groups that a step uses; the sizes of these groups; whether
    they are the groups that were connected at the start; and the timeout of each group after a step, in seconds."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.distributed.comm import build_group
    from toolkit.launch.accelerator import build_accelerator, connect_devices
    from toolkit.parallel.wrap import reduction_groups, shard_model

    accelerator = build_accelerator(TIMEOUT_S)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        connect_devices(accelerator)
    connected = [call.kwargs["group"] for call in all_reduce.call_args_list]
    sharded = shard_model(accelerator, T5ForConditionalGeneration(T5Config(**T5_CONFIG)))
    groups = reduction_groups(sharded.model)
    total = torch.tensor(10.0 ** dist.get_rank())
    for group in groups:
        dist.all_reduce(total, group=group)
    build_group()
    ids = torch.arange(8).reshape(2, 4)
    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    mine = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    cpu = torch.device("cpu")
    timeouts = [group._get_backend(cpu).options._timeout.total_seconds() for group in mine]  # type: ignore[attr-defined]
    return {
        "total": total.item(),
        "sizes": [group.size() for group in groups],
        "are_connected": connected == groups,
        "timeouts": timeouts,
    }


@pytest.mark.parametrize(
    ("preset", "overrides", "sizes"),
    [
        ("fsdp2_hsdp", GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"], [2, 2]),
        ("fsdp1_hybrid_shard", AS_TWO_MACHINES, [2, 2]),
        ("ddp_cpu", {}, [2]),
    ],
)
def test_the_steps_groups_reach_all_ranks_and_follow_the_runs_timeout(
    preset: str, overrides: dict[str, Any], sizes: list[int]
) -> None:
    """A communicator over all ranks of its own would be one of hundreds of ranks beside the mesh's. Hybrid FSDP1's constructor
    makes its own, with torch's limit, and connects them."""
    is_hybrid = preset == "fsdp1_hybrid_shard"
    function: Any = with_two_devices if is_hybrid else look_at_groups
    reports = run_on_ranks(function, preset=preset, overrides=overrides, args=(look_at_groups,) if is_hybrid else ())
    total = sum(10.0**rank for rank in range(len(reports)))
    for report in reports:
        # The control group and the checkpoint thread's wait for days by design.
        of_the_run = [seconds for seconds in report.pop("timeouts") if seconds != CONTROL_TIMEOUT.total_seconds()]
        assert len(of_the_run) >= 2 * len(sizes) - 1 and set(of_the_run) == {2 * TIMEOUT_S}  # all ranks, shards, replicas
        assert report == {"total": total, "sizes": sizes, "are_connected": not is_hybrid}
