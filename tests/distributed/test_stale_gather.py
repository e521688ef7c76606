"""A unit that FSDP2 gathered ahead of an evaluation's end is not used after the weights have changed."""

from __future__ import annotations

import pytest

from tests.support.launch import run_on_ranks


def logits_after_a_change() -> list[list[float]]:
    """On every rank: generate by the sharded model, change all weights, and compute logits sharded and unsharded."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.gather import evaluation_model, generation_ready
    from toolkit.parallel.wrap import shard_model

    torch.manual_seed(0)
    sharded = shard_model(build_accelerator(), T5ForConditionalGeneration(T5Config(**T5_CONFIG)))
    ids = torch.arange(3, 11).reshape(2, 4)
    with torch.no_grad():
        with evaluation_model(sharded, "never") as (model, in_step), generation_ready(sharded, model):
            model.generate(input_ids=ids, max_new_tokens=3, synced_gpus=in_step)
        for parameter in sharded.model.parameters():
            parameter.mul_(0.5)
        found = []
        for unshard in ("never", "auto"):
            with evaluation_model(sharded, unshard) as (model, _):
                found.append(model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits[0, :, :8].flatten().tolist())
    return found


def test_generation_leaves_no_gather_behind() -> None:
    for sharded, unsharded in run_on_ranks(logits_after_a_change, preset="fsdp2_cpu", overrides={"mixed_precision": "no"}):
        assert sharded == pytest.approx(unsharded, rel=1e-5, abs=1e-6)
