"""Under bf16, what trains is stored in fp32, and gradients are reduced over the ranks in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.absolute_runs import run_ranks
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU
from tests.support.small_run import run_in_this_process

LARGEST_SHARE = 0.6
"""Of values that bf16 can hold. Half of the sums of two ranks' gradients need more bits, and nearly all weights do."""


@pytest.mark.parametrize(("kind", "preset"), [("t5", "fsdp2_cpu"), ("lora", "fsdp2_cpu"), ("t5", "fsdp1_full_shard")])
def test_in_bf16_what_trains_and_sums_of_gradients_are_fp32(tmp_path: Path, kind: str, preset: str) -> None:
    """By their values: a tensor of fp32 may hold what was rounded before."""
    flags = ["--train.micro_batch_size_rows=8", "--train.max_steps=2", "--optim.warmup_steps=1"]
    flags += ["--eval.generate=false", "--eval.at_start=false"]
    overrides = GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {}) | {"mixed_precision": "bf16"}
    for shares in run_ranks(kind, preset, tmp_path, overrides, flags, train_and_measure):
        assert shares["weights"] < LARGEST_SHARE, "weights are rounded to bf16"
        assert shares["gradients"] < LARGEST_SHARE, "gradients are rounded to bf16"


def train_and_measure(recipe: str, argv: list[str], folder: Path) -> dict[str, float]:
    """On every rank: the share of a step's gradients, and of the weights after an update, that bf16 can hold."""
    import torch

    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    clip, shares = loop.clip_gradients, {}

    def share(tensors: list[Any]) -> float:
        values = torch.cat([local_tensor(tensor).detach().float().flatten() for tensor in tensors])
        values = values[values != 0]
        return (values == values.bfloat16()).float().mean().item()

    def look_and_clip(model: Any, *rest: Any) -> Any:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shares.update(weights=share(trained), gradients=share([p.grad for p in trained if p.grad is not None]))
        return clip(model, *rest)

    with patch.object(loop, "clip_gradients", look_and_clip):
        run_in_this_process(recipe, argv)
    return shares
