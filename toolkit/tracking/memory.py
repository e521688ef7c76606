"""Records the peak memory of training steps on each rank in the run folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
from pathlib import Path
from typing import Any

import torch

from toolkit.distributed.comm import gather_objects, rank, world_size
from toolkit.distributed.device import GIB, smallest_gpu_bytes
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.tracking.metrics_log import MetricsLog

logger = logging.getLogger("toolkit")

MEMORY_FILE, ACCELERATE_FILE = "memory.json", "accelerate.yaml"


class StepMemory:
    """The peak memory of this rank's training steps so far, and the shape of its largest micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_gib = 0.0
        self.num_rows = self.num_tokens = 0
        self.row_tokens: dict[str, int] = {}

    def restart(self) -> None:
        """Reset the peak, so that memory outside of steps does not count. Where the system does not allow that, it remains."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # man proc: resets the peak resident size

    def read(self) -> float:
        """Peak GiB of this process since `restart`: allocated on a CUDA device, resident on a CPU."""
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.peak_gib = max(self.peak_gib, peak_bytes / GIB)
        return peak_bytes / GIB

    def see(self, batch: dict[str, torch.Tensor], num_packs: int) -> None:
        """Record the shape of a micro-batch. Its packs may share one row of the tensors (`CausalCollator.one_row`)."""
        sides = {"source": "input_ids", "target": "decoder_input_ids"} if "decoder_input_ids" in batch else {"row": "input_ids"}
        row_tokens = {side: math.ceil(batch[name].numel() / num_packs) for side, name in sides.items()}
        if (num_tokens := num_packs * sum(row_tokens.values())) > self.num_tokens:
            self.num_rows, self.row_tokens, self.num_tokens = num_packs, row_tokens, num_tokens


def save_memory(folder: Path, memory: StepMemory, metrics: MetricsLog) -> None:
    """Write the ranks' peak memory and the accelerate YAML into the run folder, and print the peak of GPUs. Collective.

    On a CPU the peak is mostly the libraries', so it says little about the run and is not printed.
    """
    ranks = gather_objects((memory.peak_gib, memory.num_tokens, memory.num_rows, memory.row_tokens))
    gpu_bytes = smallest_gpu_bytes(memory.device)
    peaks = [entry[0] for entry in ranks]
    if rank() != 0 or not any(peaks):  # no step was taken
        return
    largest = max(ranks, key=lambda entry: entry[1])
    found: dict[str, Any] = {
        "device": memory.device.type,
        "gpu_gib": gpu_bytes / GIB if gpu_bytes else None,
        "num_processes": world_size(),
        "peak_gib": peaks,
        "micro_batch_size_rows": largest[2],
        "row_tokens": largest[3],
    }
    launched_with = find_accelerate_yaml()
    metrics.reopen()  # and the run folder, if it has been removed
    with metrics.noting_failure(folder / MEMORY_FILE):
        (folder / MEMORY_FILE).write_text(json.dumps(found, indent=2) + "\n")
        if launched_with is not None:
            (folder / ACCELERATE_FILE).write_text(launched_with.read_text(encoding="utf-8"), encoding="utf-8")
    if gpu_bytes:
        logger.info(
            f"memory of training steps: {max(peaks):.2f} GiB on the rank with most; `python -m toolkit report --text {folder}` "
            "compares it with the memory plan"
        )
