"""In what dtype parameters are stored."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.models.freeze import cast_frozen


def test_frozen_weights_are_cast_but_for_layer_norms_and_what_trains_is_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    cast_frozen(model, torch.bfloat16)
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32, torch.float32]
