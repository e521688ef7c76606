"""What this rank's device is, its memory use and synchronization, and the host cores for its threads."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from toolkit.distributed.comm import gather_objects
from toolkit.errors import UserError
from toolkit.private import private
from toolkit.variables import local_world_size

GIB = 2**30


def describe_device(device: torch.device) -> str:
    """What the processes of this run compute on, in words: GPUs and their memory, or cores; and threads. Collective."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        own = f"{properties.name} ({properties.total_memory / GIB:.1f} GiB)"
    else:
        own = f"the CPU ({available_cores()} cores)"
    kinds = Counter(gather_objects((own, torch.get_num_threads())))
    return "; ".join(
        f"{number} process{'es, each' if number > 1 else ''} on {what} with {threads} thread{'s' if threads > 1 else ''}"
        for (what, threads), number in kinds.items()
    )


def check_own_gpu(device: torch.device) -> None:
    """Refuse ranks that share a GPU: accelerate lets them (accelerate/state.py:843), and nccl blames the network. More ranks than
    GPUs are a `UserError` on every rank. Collective."""
    if device.type != "cuda":
        return
    gpus = gather_objects(str(torch.cuda.get_device_properties(device).uuid))
    if (num_gpus := len(set(gpus))) < len(gpus):
        raise UserError(
            f"{len(gpus)} processes share {num_gpus} GPUs, and each needs one of its own: set num_processes to {num_gpus} in "
            "the accelerate config, or give each process its own CUDA_VISIBLE_DEVICES",
            printed_by="run",
        )


def smallest_gpu_bytes(device: torch.device) -> int | None:
    """Memory of the smallest GPU of the run; None on CPUs. Collective."""
    if device.type != "cuda":
        return None
    return min(gather_objects(torch.cuda.get_device_properties(device).total_memory))


def free_memory_bytes(device: torch.device) -> int:
    """Memory this process can still allocate: free on its CUDA device, or its share of the host's available memory."""
    if device.type == "cuda":
        # Memory that torch's allocator has reserved but not allocated is free to this process too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available // local_world_size()


def available_cores() -> int:
    """Cores that this process may use: those of its affinity mask, at most its control group's CPU quota rounded up."""
    return math.ceil(min(len(os.sched_getaffinity(0)), _cpu_quota_cores()))


def _cpu_quota_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The smallest CPU quota of this process's control group and those around it, in cores; infinity without one.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`).
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        folder = root / own.read_text().rpartition("0::/")[2].strip()
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (group / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))  # "max" is not a number
    return min(quotas)


def cpu_has_bf16() -> bool:
    """Whether this CPU has bf16 arithmetic (x86's AVX512_BF16 or AMX, ARM's bf16) that oneDNN may use (ONEDNN_MAX_CPU_ISA).

    oneDNN alone says yes to any AVX-512.
    """
    features = torch.cpu.get_capabilities()
    is_here = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return is_here and torch.backends.mkldnn.is_available() and private("_is_mkldnn_bf16_supported")()


@contextlib.contextmanager
def all_cores(device: torch.device) -> Iterator[None]:
    """On a node with GPUs, let torch use all cores of this process, while the other ranks wait. On a CPU, change nothing."""
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        if device.type != "cpu":
            torch.set_num_threads(available_cores())
        yield


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
