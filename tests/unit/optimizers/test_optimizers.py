"""Of every optimizer: its state is that of its layout, its update that written out, and a skipped one changes nothing; those
that are not torch's compute what transformers, torchao or the paper does. Stochastic rounding to bf16: its bits are those of
the written-out hash, its mean is the value, and nothing else moves."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit
from transformers.optimization import Adafactor

from tests.support.host_reads import recorded
from tests.support.optimizer_model import SHAPES, WeightsOf, give_gradients
from tests.support.refusals import refusal
from toolkit.config.load import load_config
from toolkit.config.schema import OptimConfig, SummarizationConfig
from toolkit.optimizers import OPTIMIZERS, check_sharding, state_bytes, with_defaults
from toolkit.optimizers.adamw_8bit import _bounds, _nearest, _values, layout
from toolkit.optimizers.stepping import Rounding, random_bits
from toolkit.training.optim import build_optimizer

LR, DECAY = 1e-2, 0.1
LEAST = ["--model.name_or_path=a", "--data.source=b/c", "--train.max_steps=3"]


def built(name: str, shapes=SHAPES, **settings) -> tuple:
    config = with_defaults(OptimConfig(name=name, lr=LR, weight_decay=DECAY, **settings))
    model = WeightsOf(shapes)
    return config, model, build_optimizer(config, model)


def in_fp64(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in OPTIMIZERS), ("adafactor", {"scale_by_weight": True})])
def test_an_update_is_that_written_out_and_the_state_that_of_the_layout(name, settings):
    config, model, optimizer = built(name, **settings)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for step in range(1, 4):
        give_gradients(model, step=step)
        before = [(p.detach().clone(), {k: t.clone() for k, t in optimizer.state[p].items()}) for p in model.parameters()]
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        for parameter, (weight, state), gradient in zip(model.parameters(), before, gradients, strict=True):
            old, after = weight.double().numpy(), in_fp64(optimizer.state[parameter])
            decay = decays[id(parameter)]
            written = OPTIMIZERS[name].write_out(config, old, gradient.double().numpy(), in_fp64(state), step, LR, decay)
            change, expected = written
            np.testing.assert_allclose(parameter.detach().double().numpy() - old, change, rtol=1e-4, atol=1e-6)
            for key, value in expected.items():
                if OPTIMIZERS[name].layout(tuple(parameter.shape))[key].dtype == "uint8":
                    assert np.abs(after[key] - value).max() < 0.51, "a code is the nearest to the exact moment"
                else:
                    np.testing.assert_allclose(after[key], value, rtol=1e-5, atol=1e-6 * np.abs(value).max())
    for parameter in model.parameters():
        shape = tuple(parameter.shape)
        kept = {key: tensor for key, tensor in optimizer.state[parameter].items() if name != "adamw" or key != "step"}
        layout = OPTIMIZERS[name].layout(shape)
        assert {key: (t.shape, str(t.dtype)) for key, t in kept.items()} == {
            key: (part.shape, f"torch.{part.dtype}") for key, part in layout.items()
        }
        assert state_bytes(name, shape) == state_bytes(name, shape, shape) == sum(t.nbytes for t in kept.values())
        uncut = [t.nbytes for key, t in kept.items() if layout[key].num_shared == 0 or not t.ndim]
        assert state_bytes(name, shape, (0, *shape[1:])) == sum(uncut)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_update_changes_no_bit_and_makes_the_state_and_the_host_reads_nothing(name):
    _, model, optimizer = built(name)

    def bits() -> list[bytes]:
        kept = [tensor for p in model.parameters() for tensor in (p.detach(), *optimizer.state[p].values())]
        return [tensor.numpy().tobytes() for tensor in kept]

    for step, skipped in enumerate((1.0, 0.0, 1.0)):
        give_gradients(model, step=step)
        for parameter in model.parameters():
            parameter.grad.fill_(torch.nan) if skipped else None
        optimizer.found_inf = torch.tensor(skipped)
        before, reads = bits(), Counter[str]()
        weights = [p.detach().clone() for p in model.parameters()]
        with recorded(reads):
            optimizer.step()
        assert not reads, step
        assert all(optimizer.state[p] for p in model.parameters())
        assert all(torch.equal(p, weight) == bool(skipped) for p, weight in zip(model.parameters(), weights, strict=True))
        if step:  # the first one makes the state
            assert (bits() == before) == bool(skipped)


def test_unset_settings_are_the_optimizers_own_and_what_an_optimizer_lacks_is_refused():
    for name, optimizer in OPTIMIZERS.items():
        check_sharding(name, is_flat=optimizer.TAKES_FLAT)
        if not optimizer.TAKES_FLAT:
            sentence = f"optim.name is {name}, which needs the rows that FSDP1 flattens: set fsdp_version: 2"
            assert refusal(check_sharding, name, is_flat=True).startswith(sentence)
        optim = load_config(SummarizationConfig, [*LEAST, f"--optim.name={name}"]).optim
        expected = dict.fromkeys(("beta1", "beta2", "eps")) | optimizer.DEFAULTS
        assert {key: getattr(optim, key) for key in expected} == expected
    for given, start, end in (
        (["name=adafactor", "beta2=0.95"], "beta2 is 0.95, but optim.name is adafactor, which does not have it: ", " null"),
        (["scale_by_weight=true"], "scale_by_weight is True, but optim.name is adamw, ", " set it to false"),
    ):
        said = refusal(load_config, SummarizationConfig, [*LEAST, *(f"--optim.{setting}" for setting in given)])
        assert said.startswith(f"optim.{start}") and said.endswith(end)


@pytest.mark.parametrize("scales", [False, True])
def test_updates_are_those_of_transformers(scales):
    (_, ours, optimizer), theirs = built("adafactor", scale_by_weight=scales), WeightsOf(SHAPES)
    groups = [{"params": list(theirs.parameters()), "weight_decay": DECAY}]
    reference = Adafactor(groups, lr=LR, relative_step=False, scale_parameter=scales)
    for step in range(20):
        for model, of in ((ours, optimizer), (theirs, reference)):
            give_gradients(model, step)
            for group in of.param_groups:
                group["lr"] = LR / (1 + step)
            of.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for name, kept in reference.state[b].items():
            if isinstance(kept, torch.Tensor) and name != "RMS":
                torch.testing.assert_close(optimizer.state[a][name], kept, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_torchao_also_beside_each_bound(is_signed):
    values, bounds = (make(is_signed, torch.device("cpu")) for make in (_values, _bounds))
    assert values.tolist() == torch.tensor(create_dynamic_map(is_signed)).tolist()
    around = [bounds]
    for limit in (-2.0, 2.0):
        for _ in range(3):
            around.append(around[-1].nextafter(torch.tensor(limit)))
    numbers = torch.cat([*around, values, torch.linspace(-1.0 if is_signed else 0.0, 1, 100_001)])
    numbers = numbers[numbers.abs() <= 1]
    assert torch.equal(_nearest(numbers, is_signed), quantize_8bit_with_qmap(numbers, values))


def test_updates_and_state_are_those_of_torchao_bit_for_bit():
    shapes, is_signed = [(7, 1024), (2, 2048), (5,), (4, 4, 256), (3, 4)], {"exp_avg": True, "exp_avg_sq": False}
    (_, ours, optimizer), theirs = built("adamw_8bit", shapes), WeightsOf(shapes)
    states = [
        {key: OptimState8bit.zeros(p.shape, s) if p.numel() >= 4096 else torch.zeros_like(p) for key, s in is_signed.items()}
        for p in theirs.parameters()
    ]
    for step in range(1, 11):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        for parameter, state in zip(theirs.parameters(), states, strict=True):
            moments = (state["exp_avg"], state["exp_avg_sq"], None)
            with torch.no_grad():
                rest = (LR, 0.9, 0.999, DECAY, 1e-8, True, False)
                single_param_adam(parameter, parameter.grad, torch.tensor(float(step)), *moments, *rest)
    for a, b, state in zip(ours.parameters(), theirs.parameters(), states, strict=True):
        assert torch.equal(a, b)
        for name, expected in state.items():
            codes = expected.codes if isinstance(expected, OptimState8bit) else expected
            assert torch.equal(optimizer.state[a][name], codes)
            if isinstance(expected, OptimState8bit):
                assert torch.equal(optimizer.state[a][f"{name}_scale"].flatten(), expected.scale)


def test_the_full_shape_decides_what_is_kept_in_8_bits():
    blocks = {shape: layout(shape)["exp_avg_scale"].shape for shape in [(16, 256), (1000, 896), (64, 320), (2, 4, 512)]}
    assert blocks == {(16, 256): (16, 1), (1000, 896): (1000, 7), (64, 320): (64, 5), (2, 4, 512): (2, 4, 2)}
    assert all("exp_avg_scale" not in layout(shape) for shape in [(15, 256), (8192,), (1000, 96), (8192, 1)])
    assert state_bytes("adamw_8bit", (4096, 4096)) / 4096**2 == pytest.approx(2 + 8 / 256)


@torch.no_grad()
def test_updates_are_those_of_the_paper():
    (_, ours, optimizer), theirs = built("lion"), WeightsOf(SHAPES)
    moments = [torch.zeros_like(p) for p in theirs.parameters()]
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        for parameter, moment in zip(theirs.parameters(), moments, strict=True):
            parameter.mul_(1 - LR * DECAY)
            parameter.add_(torch.sign(moment * 0.9 + parameter.grad * (1 - 0.9)), alpha=-LR)
            moment.mul_(0.99).add_(parameter.grad * (1 - 0.99))
    for a, b, moment in zip(ours.parameters(), theirs.parameters(), moments, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(optimizer.state[a]["exp_avg"], moment, rtol=0, atol=0)


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


@pytest.mark.parametrize("value", [1.0009765625, -3.1415927, 1e-39, 65504.3])
def test_the_mean_is_the_value_and_each_is_a_neighbour(value):
    values = torch.full((1 << 16,), value)
    rounded = Rounding(key=7, offset=0).round(values, 0)
    assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) == 2
    low, high = rounded.double().unique().tolist()
    assert low < values[0].double() < high
    assert abs((rounded.double().mean() - values[0].double()) / (high - low)) < 0.01


def test_what_bf16_has_stays_and_what_is_not_finite_stays_so():
    for values in (torch.randn(1000).bfloat16().float(), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])):
        torch.testing.assert_close(Rounding(3, 0).round(values, 0).float(), values, rtol=0, atol=0, equal_nan=True)


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
