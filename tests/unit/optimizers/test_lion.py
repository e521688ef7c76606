"""Lion is algorithm 2 of its paper, computed in fp32 as its authors' code does."""

from __future__ import annotations

import torch

from tests.support.optimizer_model import SHAPES, WeightsOf, give_gradients
from toolkit.config.schema import OptimConfig
from toolkit.training.optim import build_optimizer

LR, DECAY, BETA1, BETA2 = 1e-3, 0.1, 0.9, 0.99


@torch.no_grad()
def test_updates_are_those_of_the_paper() -> None:
    ours, theirs = WeightsOf(SHAPES), WeightsOf(SHAPES)
    optimizer = build_optimizer(OptimConfig(name="lion", lr=LR, weight_decay=DECAY), ours)
    moments = [torch.zeros_like(p) for p in theirs.parameters()]
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        for parameter, moment in zip(theirs.parameters(), moments, strict=True):
            assert parameter.grad is not None
            parameter.mul_(1 - LR * DECAY)
            parameter.add_(torch.sign(moment * BETA1 + parameter.grad * (1 - BETA1)), alpha=-LR)
            moment.mul_(BETA2).add_(parameter.grad * (1 - BETA2))
    for a, b, moment in zip(ours.parameters(), theirs.parameters(), moments, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(optimizer.state[a]["exp_avg"], moment, rtol=0, atol=0)
