"""How a run's devices are described; the cores that a process may use, and the threads of a rank for work on the host."""

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from toolkit.distributed import device
from toolkit.distributed.device import _cpu_quota_cores, available_cores, check_own_gpu, describe_device
from toolkit.errors import UserError
from toolkit.launch import accelerator
from toolkit.launch.accelerator import _num_threads


def test_a_run_says_what_its_processes_compute_on(monkeypatch):
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
def test_affinity_and_the_smallest_quota_of_the_groups_around_limit_the_cores(tmp_path, monkeypatch, own, files, quota, cores):
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert _cpu_quota_cores(tmp_path / "root", tmp_path / "own") == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(device, "_cpu_quota_cores", lambda: quota)
    assert available_cores() == cores


def test_the_smallest_gpu_counts_on_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, 40 * 2**30])
    assert device.smallest_gpu_bytes(torch.device("cuda", 0)) == 40 * 2**30
    assert device.smallest_gpu_bytes(torch.device("cpu")) is None


def test_ranks_that_share_a_gpu_are_refused(monkeypatch):
    """accelerate gives rank 2 the GPU of rank 0 where there are two, and nccl fails later with words about the network."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, "GPU-1"])
    check_own_gpu(torch.device("cuda", 0))
    monkeypatch.setattr(device, "gather_objects", lambda own: [own, "GPU-1", own, "GPU-1"])
    with pytest.raises(UserError, match="4 processes share 2 GPUs, and each needs one of its own: set num_processes to 2"):
        check_own_gpu(torch.device("cuda", 0))


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch) -> Iterator[None]:
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
def test_ranks_with_gpus_share_the_cores_of_their_node(monkeypatch, device, own_cores, ranks, num_threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own_cores)
    monkeypatch.setattr(accelerator, "gather_objects", lambda _: ranks)
    assert _num_threads(device) == num_threads


def test_the_setting_overrides_the_launcher(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("toolkit.launch.environment.find_accelerate_yaml", lambda: None)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator.build_accelerator(num_threads=3)
    assert torch.get_num_threads() == 3
