"""Memory use and synchronization of this rank's device."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process since `reset_peak_memory`, in GiB: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peak of `peak_memory_gib`. If the system does not allow that, the peak since the process start remains."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man proc: resets the peak resident size


def held_memory_gib(device: torch.device) -> float:
    """Memory that this process holds now, in GiB: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    import psutil

    return psutil.Process().memory_info().rss / GIB


def free_memory_bytes(device: torch.device) -> int:
    """Memory this process can still allocate: free on its CUDA device, or its share of the host's available memory."""
    if device.type == "cuda":
        # Memory that torch's allocator has reserved but not allocated is free to this process too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
