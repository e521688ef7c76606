"""Stochastic rounding to bf16: its bits are those of the written-out hash, its mean is the value, and nothing else moves."""

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.config.schema import OptimConfig
from toolkit.optimizers.rounding import Rounding, random_bits
from toolkit.training.optim import build_optimizer


def written_out(positions: np.ndarray, key: int) -> np.ndarray:
    """In unsigned numbers of 32 bits, which wrap around."""
    x = positions.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return (x ^ (x >> 15)) >> 16


@pytest.mark.parametrize("key", [0, 1, 0x7FFFFFFF, 0x80000000, 2**63 - 1])
def test_bits_are_those_of_the_hash(key):
    positions = torch.cat([torch.arange(5000), torch.arange(2**31 - 100, 2**31 + 100), torch.arange(2**33, 2**33 + 100)])
    assert np.array_equal(random_bits(positions, key).numpy(), written_out(positions.numpy() & 0xFFFFFFFF, key))


def test_bits_are_even_and_differ_from_key_to_key():
    one, other = (random_bits(torch.arange(1 << 16), key).double() / 2**16 for key in (12345, 12346))
    assert abs(one.mean() - 0.5) < 0.01 and abs(one.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 0.02


@pytest.mark.parametrize("value", [1.0009765625, -3.1415927, 1e-39, 65504.3])
def test_the_mean_is_the_value_and_each_is_a_neighbour(value):
    values = torch.full((1 << 16,), value)
    rounded = Rounding(key=7, offset=0).round(values, 0)
    assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) == 2
    low, high = rounded.double().unique().tolist()
    assert low < values[0].double() < high
    assert abs((rounded.double().mean() - values[0].double()) / (high - low)) < 0.01


def test_what_bf16_has_stays_and_what_is_not_finite_stays_so():
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(Rounding(3, 0).round(values, 0).float(), values)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    torch.testing.assert_close(Rounding(3, 0).round(odd, 0).float(), odd, equal_nan=True)


def test_a_shard_is_rounded_as_its_part_of_the_weight():
    weight = torch.randn(6, 10, 4)
    whole = Rounding(9, 0).round(weight.view(-1), 0).view(weight.shape)
    rows = Rounding(9, offset=2 * 40).round(weight[2:5].reshape(-1), 0).view(3, 10, 4)
    inner = Rounding(9, offset=3 * 4, block=5 * 4, full_block=40).round(weight[:, 3:8].reshape(-1), 0).view(6, 5, 4)
    piece = Rounding(9, offset=2 * 40).round(weight[3].reshape(-1), 40).view(10, 4)
    for part, expected in ((rows, whole[2:5]), (inner, whole[:, 3:8]), (piece, whole[3])):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "lion"])
def test_small_updates_add_up_where_the_nearest_would_stay(name):
    """200 updates of 1e-4 at 1.0, where neighbours in bf16 are 0.0039 and 0.0078 away."""
    model = nn.Linear(64, 128, bias=False).bfloat16()
    model.weight.grad_dtype = None
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = build_optimizer(OptimConfig(name=name, lr=1e-4), model)
    for number in range(1, 201):
        optimizer.number = number
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved = 1.0 - model.weight.double()
    assert abs(moved.mean() - 0.02) < 0.001 and moved.std() > 0.001
