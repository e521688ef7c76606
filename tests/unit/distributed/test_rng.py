"""What is done within `random_state_kept` leaves every generator as it was, and a checkpoint gives each rank its own back."""

import contextlib
import random

import numpy as np
import pytest
import torch

from toolkit.distributed import rng
from toolkit.distributed.rng import random_state_kept


def draw() -> list[float]:
    """From every generator."""
    return [random.random(), np.random.random(), torch.rand(()).item()]


def test_draws_within_are_not_seen_after_it_however_it_ends():
    for ends_by in (None, ValueError):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        expected = draw()
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        with contextlib.suppress(ValueError), random_state_kept():
            assert draw() == expected
            if ends_by is not None:
                raise ends_by
        assert draw() == expected


def test_a_seed_reaches_every_generator_and_gpu_and_writes_no_stack_for_devices_that_are_not_there(monkeypatch):
    drawn, seeds = [], []
    with monkeypatch.context() as patch:
        patch.setattr("traceback.format_stack", lambda *_: pytest.fail("a call for a device was put off"))
        for number in (1, 1, 2):
            rng.seed_all("step", number)
            drawn.append(draw())
    assert drawn[0] == drawn[1] and all(one != other for one, other in zip(*drawn[1:], strict=True))
    torch.manual_seed(rng.derive_seed("step", 1))
    assert torch.rand(()).item() == drawn[0][-1], "torch's is that of its manual_seed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    rng.seed_all("step", 1)
    assert seeds == [rng.derive_seed("step", 1)]


def test_each_rank_gets_its_own_state_back(tmp_path, monkeypatch):
    monkeypatch.setattr(rng, "world_size", lambda: 2)
    monkeypatch.setattr(rng, "on_all_ranks", lambda work: work())
    drawn = []
    for work in (lambda: rng.save_random_state(rng.capture_random_state(), tmp_path), lambda: rng.load_random_state(tmp_path, 2)):
        for rank in (0, 1):
            monkeypatch.setattr(rng, "rank", lambda rank=rank: rank)
            rng.seed_all("before the save" if len(drawn) < 2 else "after it", rank)
            draw()  # a state in the middle of what a seed gives
            work()
            drawn.append(draw())
    assert drawn[2:] == drawn[:2] and drawn[0] != drawn[1]
