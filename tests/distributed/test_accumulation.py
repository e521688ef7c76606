"""What a step reduces once for all its micro-batches, as gradients between HSDP's replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks

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
