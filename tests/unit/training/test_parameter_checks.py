"""The checks of frozen and trainable parameters see what they are there for. Which updates are skipped: what is not finite on
any rank, and what spikes, by a window that a resume takes over exactly."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.checkpoint.state import SkipHistory
from toolkit.config.schema import OptimConfig
from toolkit.errors import UserError
from toolkit.training import parameter_checks
from toolkit.training.parameter_checks import ParameterWatch
from toolkit.training.skip_guard import SkipGuard


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
def test_a_sound_step_passes_and_what_is_wrong_with_a_parameter_is_named(model, name, change, error, sentence):
    check_all(ParameterWatch(model, num_skipped=0), step(model))
    model.zero_grad()
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


NAN, INF = math.nan, math.inf
GUARDED = OptimConfig(skip_beyond_sigmas=3.0, skip_window_steps=4)
STEADY = [1.0, 1.5, 2.0, 1.25]
"""Fills the window of `GUARDED`, which then lets 2.72 through."""


def judge(guard: SkipGuard, *norms: float, loss: float = 1.0) -> list[bool]:
    """Which of these steps are skipped."""
    return [bool(guard.should_skip(torch.tensor(loss), torch.tensor(norm))[1]) for norm in norms]


@pytest.mark.parametrize(
    ("loss", "norm", "skipped"),
    [(1.0, 1.0, False), (0.0, 0.0, False), *((bad, 1.0, True) for bad in (NAN, INF, -INF)), (1.0, NAN, True), (1.0, INF, True)],
)
def test_what_is_not_finite_is_skipped_by_the_sums_over_every_group(loss, norm, skipped, monkeypatch):
    """Under HSDP each rank is in two groups, which together reach all ranks."""
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda figures, group: reduced.append(group))
    groups = ["replicas", "shards"]
    total, verdict = SkipGuard(OptimConfig(), SkipHistory(), groups).should_skip(torch.tensor(loss), torch.tensor(norm))
    assert reduced == groups and verdict.item() == float(skipped)
    assert verdict.dtype == torch.float32, "the fused kernel reads a float"
    assert total.item() == loss or math.isnan(total.item()) and math.isnan(loss)


def test_a_spike_is_skipped_where_that_is_asked_for_and_a_norm_beside_a_bad_loss_counts():
    off, history = SkipGuard(OptimConfig(skip_window_steps=4), SkipHistory(), []), SkipHistory()
    assert judge(off, *STEADY, 1e30) == [False] * 5
    off.save_to(history)
    assert history == SkipHistory(), "a guard that is off has something to remember"
    guard = SkipGuard(GUARDED, SkipHistory(), [])
    assert judge(guard, *STEADY, 2.73) == [False] * 4 + [True]
    assert judge(guard, 1.0, loss=NAN) == [True]
    assert guard.num_seen.item() == 6, "a finite norm beside a loss that is not is remembered"


def test_guard_is_that_of_the_formula():
    """A random walk with spikes and NaNs, beside the same rule in NumPy."""
    random = np.random.Generator(np.random.PCG64(0))
    norms = np.exp(random.normal(0, 0.3, 200)).astype(np.float32)
    norms[random.permutation(200)[:30]] *= 20
    norms[random.permutation(200)[:20]] = NAN
    norms[random.permutation(200)[:10]] = INF
    window: list[float] = []
    expected = []
    for norm in norms.tolist():
        highest = np.mean(window) + 3 * np.std(window, ddof=1) if len(window) == 4 else INF
        expected.append(not math.isfinite(norm) or norm > highest)
        if math.isfinite(norm):
            window = [*window, min(norm, highest)][-4:]
    guard = SkipGuard(GUARDED, SkipHistory(), [])
    assert judge(guard, *norms.tolist()) == expected
    assert expected.count(True) > 40 and expected.count(False) > 100
    assert sorted(guard.window.tolist()) == pytest.approx(sorted(window), rel=1e-5)


def test_saved_window_is_the_window_bit_for_bit():
    random = np.random.Generator(np.random.PCG64(1))
    norms = np.exp(random.normal(0, 1, 30)).tolist()
    for stop in range(12):  # at every filling of the window, and at every place in it
        whole, first = (SkipGuard(GUARDED, SkipHistory(), []) for _ in range(2))
        judge(whole, *norms[:stop])
        judge(first, *norms[:stop])
        history = SkipHistory(num_skipped=3, num_in_a_row=2)
        first.save_to(history)
        assert (history.num_skipped, history.num_in_a_row) == (3, 2)
        resumed = SkipGuard(GUARDED, SkipHistory(**json.loads(json.dumps(asdict(history), allow_nan=False))), [])
        assert judge(resumed, *norms[stop:]) == judge(whole, *norms[stop:])
        assert resumed.window.tolist() == whole.window.tolist()
        assert resumed.num_seen.item() == whole.num_seen.item() == 30
