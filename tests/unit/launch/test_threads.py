"""Threads of a rank for work on the host: with a GPU its share of the cores, on a CPU what the launcher has set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from toolkit.distributed.device import all_cores
from toolkit.launch import accelerator
from toolkit.launch.accelerator import _num_threads

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of 12 cores and 4 ranks, as `accelerate launch` starts them; torch's threads are put back."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr("toolkit.distributed.device._cpu_quota_cores", lambda: 12.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    yield
    torch.set_num_threads(num_threads)


MINE = {0, 1, 2}


@pytest.mark.parametrize(
    ("device", "own_cores", "ranks", "num_threads"),
    [
        (GPU, set(range(12)), [(node, set(range(12))) for node in (0, 0, 0, 0, 1, 1, 1, 1)], 3),  # they share their node's
        (GPU, MINE, [(0, MINE), (0, {3, 4, 5}), (0, {6, 7, 8}), (0, {9, 10, 11}), (1, MINE)], 3),  # each is bound to its own
        (CPU, set(range(12)), [], 1),  # a rehearsal keeps the launcher's number
    ],
)
def test_ranks_with_gpus_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, own_cores: set[int], ranks: list[Any], num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own_cores)
    monkeypatch.setattr(accelerator, "gather_objects", lambda _: ranks)
    assert _num_threads(device) == num_threads


def test_an_export_on_gpus_takes_all_cores_and_gives_them_back() -> None:
    torch.set_num_threads(2)
    with all_cores(GPU):
        assert torch.get_num_threads() == 12
    assert torch.get_num_threads() == 2
    with all_cores(CPU):
        assert torch.get_num_threads() == 2


def test_the_setting_overrides_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("toolkit.launch.environment.find_accelerate_yaml", lambda: None)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator.build_accelerator(num_threads=3)
    assert torch.get_num_threads() == 3
