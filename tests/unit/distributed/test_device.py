"""How a run's devices are described, and how many cores a process may use, by its affinity mask and its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.distributed import device
from toolkit.distributed.device import _cpu_quota_cores, available_cores, check_own_gpu, describe_device
from toolkit.errors import UserError


def test_a_run_says_what_its_processes_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_045_870_592)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(device, "available_cores", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, ("another (1.0 GiB)", 1), own])
    expected = (
        "2 processes, each on NVIDIA H100 80GB HBM3 (79.2 GiB) with 3 threads; 1 process on another (1.0 GiB) with 1 thread"
    )
    assert describe_device(torch.device("cuda", 0)) == expected
    monkeypatch.setattr(device, "gather_objects", lambda own: [own])
    assert describe_device(torch.device("cpu")) == "1 process on the CPU (12 cores) with 3 threads"


@pytest.mark.parametrize(
    ("own", "files", "quota", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 12),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5, 3),
        ("0::/", {"cpu.max": "10000 100000"}, 0.1, 1),
        ("0::/job/task", {"job/cpu.max": "400000 100000", "job/task/cpu.max": "max 100000"}, 4.0, 4),
        ("0::/gone", {"cpu.max": "100000 100000"}, 1.0, 1),
        ("3:memory:/job", {}, math.inf, 12),
    ],
)
def test_affinity_and_the_smallest_quota_of_the_groups_around_limit_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], quota: float, cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert _cpu_quota_cores(tmp_path / "root", tmp_path / "own") == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(device, "_cpu_quota_cores", lambda: quota)
    assert available_cores() == cores


def test_the_smallest_gpu_counts_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, 40 * 2**30])
    assert device.smallest_gpu_bytes(torch.device("cuda", 0)) == 40 * 2**30
    assert device.smallest_gpu_bytes(torch.device("cpu")) is None


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate gives rank 2 the GPU of rank 0 where there are two, and nccl fails later with words about the network."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, "GPU-1"])
    check_own_gpu(torch.device("cuda", 0))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, "GPU-1", own, "GPU-1"])
    with pytest.raises(UserError, match="4 processes share 2 GPUs, and each needs one of its own: set num_processes to 2"):
        check_own_gpu(torch.device("cuda", 0))
