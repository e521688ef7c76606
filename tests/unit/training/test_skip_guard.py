"""Which updates are skipped: what is not finite on any rank, and what spikes, by a window that a resume takes over exactly."""

import json
import math
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tests.support.host_reads import recorded
from toolkit.checkpoint.state import SkipHistory
from toolkit.config.schema import OptimConfig
from toolkit.training.optim import SkipGuard

NAN, INF = math.nan, math.inf
GUARDED = OptimConfig(skip_beyond_sigmas=3.0, skip_window_steps=4)
STEADY = [1.0, 1.5, 2.0, 1.25]
"""Fills the window of `GUARDED`: its mean is 1.4375, its standard deviation 0.427, and 2.72 is the highest norm let through."""


def judge(guard: SkipGuard, *norms: float, loss: float = 1.0) -> list[bool]:
    """Which of these steps are skipped."""
    return [bool(guard.should_skip(torch.tensor(loss), torch.tensor(norm))[1]) for norm in norms]


def test_loss_and_verdict_go_over_every_group(monkeypatch):
    """Under HSDP each rank is in two groups, which together reach all ranks."""
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda figures, group: reduced.append(group))
    groups = ["replicas", "shards"]
    SkipGuard(OptimConfig(), SkipHistory(), groups).should_skip(torch.tensor(1.0), torch.tensor(1.0))
    assert reduced == groups


@pytest.mark.parametrize(
    ("loss", "norm", "skipped"),
    [(1.0, 1.0, False), (0.0, 0.0, False), *((bad, 1.0, True) for bad in (NAN, INF, -INF)), (1.0, NAN, True), (1.0, INF, True)],
)
def test_what_is_not_finite_is_skipped(loss, norm, skipped):
    total, verdict = SkipGuard(OptimConfig(), SkipHistory(), []).should_skip(torch.tensor(loss), torch.tensor(norm))
    assert verdict.item() == float(skipped)
    assert verdict.dtype == torch.float32, "the fused kernel reads a float"
    assert total.item() == loss or math.isnan(total.item()) and math.isnan(loss)


def test_spike_is_skipped_once_the_window_is_full_where_that_is_asked_for():
    guard, history = SkipGuard(OptimConfig(skip_window_steps=4), SkipHistory(), []), SkipHistory()
    assert judge(guard, *STEADY, 1e30) == [False] * 5
    guard.save_to(history)
    assert history == SkipHistory(), "a guard that is off has something to remember"
    for norms, skipped in (([*STEADY[:3], 1e6], []), ([*STEADY, 2.71], []), ([*STEADY, 2.73, 1.5], [4])):
        guard = SkipGuard(GUARDED, SkipHistory(), [])
        assert judge(guard, *norms) == [number in skipped for number in range(len(norms))], "three norms are not a window of four"
    before = guard.num_seen.item()
    assert judge(guard, 1.0, loss=NAN) == [True]
    assert guard.num_seen.item() == before + 1, "a finite norm beside a loss that is not is remembered"


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


def test_one_spike_does_not_blind_the_guard_and_a_lasting_change_is_accepted():
    guard = SkipGuard(GUARDED, SkipHistory(), [])
    assert judge(guard, *STEADY, 1e30, 100.0) == [False] * 4 + [True, True], "blind after the first spike"
    verdicts = judge(guard, *[100.0] * 50)
    assert verdicts.index(False) < 10 and not any(verdicts[verdicts.index(False) :])


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


@pytest.mark.parametrize("config", [OptimConfig(), GUARDED])
def test_host_does_not_wait_for_the_device(config):
    guard, reads = SkipGuard(config, SkipHistory(), []), Counter[str]()
    with recorded(reads):
        for norm in (*STEADY, 1e6, NAN):
            guard.should_skip(torch.tensor(1.0), torch.tensor(norm))
    assert not reads
