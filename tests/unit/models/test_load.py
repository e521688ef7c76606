"""Which parameters are frozen, and in what dtype they are stored."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.models.freeze import cast_frozen, freeze, freeze_as


def test_frozen_weights_are_cast_but_for_layer_norms_and_what_trains_is_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    cast_frozen(model, torch.bfloat16)
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_pattern_freezes_by_every_name_that_it_matches_in_full() -> None:
    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "body_head", "head")})
        model["head"].weight = model["body"].weight
        return model

    model, again = build(), build()
    freeze(model, ["head.weight", r"body_head\.(weight|b)"])
    freeze_as(again, model)
    for one in (model, again):
        assert [name for name, p in one.named_parameters() if not p.requires_grad] == ["body.weight", "body_head.weight"]
