"""A copy of sharded tensors in host memory, which training no longer changes."""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from toolkit.checkpoint.dcp import Tensors


class HostCopier:
    """Takes host memory, pinned beside a CUDA device, for this rank's shards at its first copy, and uses it for the next ones;
    but for FSDP1, see `copy`."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
        )
        self.stager = DefaultStager(options)

    def copy(self, tensors: Tensors) -> Tensors:
        """Copies with the same placements; they are complete when this returns, and stay until the next call."""
        # torch's stager does not know FSDP1's ShardedTensors; its older one does, and takes new memory each time.
        fsdp1 = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ShardedTensor)}
        others = {name: tensor for name, tensor in tensors.items() if name not in fsdp1}
        return {**self.stager.stage(others), **BlockingAsyncStager().stage(fsdp1)}  # type: ignore[dict-item]

    def close(self) -> None:
        """Give the memory back."""
        self.stager.close()
