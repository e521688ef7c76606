"""In what dtype parameters are stored, and what a run says of its attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.models.freeze import cast_frozen
from toolkit.models.load import describe_attention, warn_of_full_rows

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DENSE = "sdpa with a dense mask, which {}: no flash kernel, but the memory-efficient one or cuDNN's"


def test_frozen_weights_are_cast_but_for_layer_norms_and_what_trains_is_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    cast_frozen(model, torch.bfloat16)
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("name", "is_encoder_decoder", "packing", "dtype", "expected"),
    [
        ("sdpa", False, False, torch.bfloat16, "sdpa, the flash kernel or cuDNN's"),
        ("sdpa", False, False, torch.float32, "sdpa in fp32: the memory-efficient kernel"),
        ("sdpa", False, True, torch.bfloat16, DENSE.format("keeps packed rows apart")),
        ("sdpa", True, False, torch.bfloat16, DENSE.format("has padding or position biases")),
        ("eager", False, True, torch.bfloat16, "eager"),
        ("flash_attention_2", False, True, torch.bfloat16, "flash_attention_2"),
    ],
)
def test_a_run_says_which_attention_kernel_runs(
    name: str, is_encoder_decoder: bool, packing: bool, dtype: torch.dtype, expected: str
) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name, is_encoder_decoder=is_encoder_decoder))
    assert describe_attention(model, GPU, dtype, packing=packing) == expected
    assert describe_attention(model, CPU, dtype, packing=packing) == name
    assert (warn_of_full_rows(model) is None) == name.startswith("flash")
