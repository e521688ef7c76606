"""AdamW in 8 bits is torchao's, number for number, where its blocks are the same."""

from __future__ import annotations

import pytest
import torch
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from tests.support.optimizer_model import WeightsOf, give_gradients
from toolkit.config.schema import OptimConfig
from toolkit.optimizers import state_bytes
from toolkit.optimizers.adamw_8bit import _bounds, _nearest, _values, layout
from toolkit.training.optim import build_optimizer

CPU = torch.device("cpu")
SHAPES = [(7, 1024), (2, 2048), (5,), (4, 4, 256), (3, 4)]


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_torchao_also_beside_each_bound(is_signed: bool) -> None:
    values, bounds = _values(is_signed, CPU), _bounds(is_signed, CPU)
    assert values.tolist() == torch.tensor(create_dynamic_map(is_signed)).tolist()
    around = [bounds]
    for limit in (-2.0, 2.0):
        for _ in range(3):
            around.append(around[-1].nextafter(torch.tensor(limit)))
    numbers = torch.cat([*around, values, torch.linspace(-1.0 if is_signed else 0.0, 1, 100_001)])
    numbers = numbers[numbers.abs() <= 1]
    assert torch.equal(_nearest(numbers, is_signed), quantize_8bit_with_qmap(numbers, values))


def test_updates_and_state_are_those_of_torchao_bit_for_bit() -> None:
    ours, theirs = WeightsOf(SHAPES), WeightsOf(SHAPES)
    optimizer = build_optimizer(OptimConfig(name="adamw_8bit", lr=1e-2, weight_decay=0.1), ours)
    in_8_bits = [p.numel() >= 4096 for p in theirs.parameters()]
    kinds = [{"exp_avg": True, "exp_avg_sq": False}] * len(SHAPES)
    states = [
        {name: OptimState8bit.zeros(p.shape, signed) if is_8 else torch.zeros_like(p) for name, signed in kind.items()}
        for p, is_8, kind in zip(theirs.parameters(), in_8_bits, kinds, strict=True)
    ]
    for step in range(1, 11):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        for parameter, state in zip(theirs.parameters(), states, strict=True):
            moments = (state["exp_avg"], state["exp_avg_sq"], None)
            with torch.no_grad():
                single_param_adam(
                    parameter, parameter.grad, torch.tensor(float(step)), *moments, 1e-2, 0.9, 0.999, 0.1, 1e-8, True, False
                )
    for a, b, state in zip(ours.parameters(), theirs.parameters(), states, strict=True):
        assert torch.equal(a, b)
        for name, expected in state.items():
            codes = expected.codes if isinstance(expected, OptimState8bit) else expected
            assert torch.equal(optimizer.state[a][name], codes)
            if isinstance(expected, OptimState8bit):
                assert torch.equal(optimizer.state[a][f"{name}_scale"].flatten(), expected.scale)


def test_the_full_shape_decides_what_is_kept_in_8_bits() -> None:
    blocks = {shape: layout(shape)["exp_avg_scale"].shape for shape in [(16, 256), (1000, 896), (64, 320), (2, 4, 512)]}
    assert blocks == {(16, 256): (16, 1), (1000, 896): (1000, 7), (64, 320): (64, 5), (2, 4, 512): (2, 4, 2)}
    assert all("exp_avg_scale" not in layout(shape) for shape in [(15, 256), (8192,), (1000, 96), (8192, 1)])
    assert state_bytes("adamw_8bit", (4096, 4096)) / 4096**2 == pytest.approx(2 + 8 / 256)
