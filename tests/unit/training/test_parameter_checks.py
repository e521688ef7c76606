"""The checks of frozen and trainable parameters see what they are there for."""

import pytest
import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.training import parameter_checks
from toolkit.training.parameter_checks import ParameterWatch


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model


def step(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


def check_moved(watch: ParameterWatch) -> None:
    """As the loop does after three updates."""
    assert [watch.count_update(lr=0.1) for _ in range(3)] == [False, False, True]
    watch.check_moved(num_skipped=0)


def check_all(watch: ParameterWatch, optimizer: torch.optim.Optimizer) -> None:
    watch.check_gradients()
    watch.check_moments(optimizer)
    check_moved(watch)
    watch.check_frozen()


def test_a_sound_step_passes(model):
    check_all(ParameterWatch(model, num_skipped=0), step(model))


NO_GRADIENT = "trainable parameters got no gradient in the first step: 1.bias: the loss does not reach them: freeze them by "


@pytest.mark.parametrize(
    ("name", "change", "error", "sentence"),
    [
        ("1.bias", lambda p, state: setattr(p, "grad", None), UserError, NO_GRADIENT),
        ("0.weight", lambda p, state: setattr(p, "grad", torch.zeros(3, 3)), RuntimeError, "frozen parameters got a gradient"),
        ("1.weight", lambda p, state: state.pop(p), RuntimeError, "no optimizer state after the first update"),
        ("1.bias", lambda p, state: p.data.copy_(p.before), RuntimeError, "have not moved after 3 updates"),
        ("0.weight", lambda p, state: p.data[1, 2].add_(1e-6), RuntimeError, "frozen parameters have changed"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_named(model, name, change, error, sentence):
    watch, parameter = ParameterWatch(model, num_skipped=0), model.get_parameter(name)
    parameter.before = parameter.detach().clone()
    optimizer = step(model)
    change(parameter, optimizer.state)
    with pytest.raises(error, match=f"{sentence}.*{name if error is RuntimeError else ''}"):
        check_all(watch, optimizer)


def test_equal_elements_that_move_alike_are_seen_to_move():
    """Norms start as ones and may all move by the same amount; the xor of an even number of equal values is 0."""
    model = nn.LayerNorm(768)
    watch = ParameterWatch(model, num_skipped=0)
    with torch.no_grad():
        model.weight -= 1e-6
        model.bias += 1e-6
    check_moved(watch)


def test_updates_that_cannot_show_are_waited_for(model):
    """The first of a warm-up are too small, and skipped ones move nothing."""
    watch = ParameterWatch(model, num_skipped=2)
    assert not any(watch.count_update(lr) for lr in (0.0, 1e-9, 0.1, 0.1, 1e-9))
    assert watch.count_update(0.1)
    watch.check_moved(num_skipped=4)  # two of the three were skipped: nothing is checked
    assert [watch.count_update(0.1) for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="have not moved after 3 updates"):
        watch.check_moved(num_skipped=4)
    assert not watch.count_update(0.1)  # checked once


def test_a_small_weight_in_bf16_may_rest_and_a_large_one_not(monkeypatch):
    watch = ParameterWatch(nn.Linear(4, 8, bias=False).bfloat16(), num_skipped=0)
    check_moved(watch)
    monkeypatch.setattr(parameter_checks, "SURE_TO_MOVE_ELEMENTS", 32)
    with pytest.raises(RuntimeError, match="have not moved after 3 updates: weight"):
        check_moved(ParameterWatch(nn.Linear(4, 8, bias=False).bfloat16(), num_skipped=0))


@pytest.mark.parametrize(("num_inputs", "most_bytes"), [(1000, 256), (999, 1024 * 8)], ids=["words", "two bytes over"])
def test_checksums_hold_no_copy_of_a_parameter(monkeypatch, num_inputs, most_bytes):
    monkeypatch.setattr(parameter_checks, "PART_ELEMENTS", 1024)
    model = nn.Linear(num_inputs, 101, bias=False).bfloat16().requires_grad_(False)
    with torch.profiler.profile(profile_memory=True) as profiler:
        watch = ParameterWatch(model, num_skipped=0)
    allocated = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(allocated) <= most_bytes  # sums of the parts; else a part in int64
    with torch.no_grad():
        model.weight[-1, -1] += 1  # in the last part
    with pytest.raises(RuntimeError, match="frozen parameters have changed: weight"):
        watch.check_frozen()
