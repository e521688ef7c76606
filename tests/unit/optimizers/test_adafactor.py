"""Adafactor is transformers' own, with the learning rate from outside."""

from __future__ import annotations

import pytest
import torch
from transformers.optimization import Adafactor

from tests.support.optimizer_model import SHAPES, WeightsOf, give_gradients
from toolkit.config.schema import OptimConfig
from toolkit.training.optim import build_optimizer


@pytest.mark.parametrize("scales", [False, True])
def test_updates_are_those_of_transformers(scales: bool) -> None:
    ours, theirs = WeightsOf(SHAPES), WeightsOf(SHAPES)
    config = OptimConfig(name="adafactor", lr=1e-2, weight_decay=0.1, scale_by_weight=scales)
    optimizer = build_optimizer(config, ours)
    groups = [{"params": list(theirs.parameters()), "weight_decay": 0.1}]
    reference = Adafactor(groups, lr=1e-2, relative_step=False, scale_parameter=scales)
    for step in range(20):
        for model, of in ((ours, optimizer), (theirs, reference)):
            give_gradients(model, step)
            for group in of.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            of.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for name, kept in reference.state[b].items():
            if isinstance(kept, torch.Tensor) and name != "RMS":
                torch.testing.assert_close(optimizer.state[a][name], kept, rtol=1e-6, atol=1e-12)
