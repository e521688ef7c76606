"""Memory and clock of the device of this rank."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    pass

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Highest memory of this process since `reset_peak_memory`: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_gib` look anew, where the system allows it; else it goes on from the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man proc: resets the peak resident size


def held_memory_gib(device: torch.device) -> float:
    """What this process holds now: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    import psutil

    return psutil.Process().memory_info().rss / GIB


def free_memory_bytes(device: torch.device) -> int:
    """Memory this process could still take: free on its CUDA device, or its share of the host's available memory."""
    if device.type == "cuda":
        # What torch's allocator holds in reserve is free to this process too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, for an honest clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
