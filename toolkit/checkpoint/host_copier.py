"""Copies of a rank's shards in host memory, made beside training, from which a thread writes a checkpoint."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.dcp import Tensors
from toolkit.private import private


class HostCopier:
    """Stages this rank's shards in host memory (pinned if on CUDA), which the first copy allocates and later ones reuse.

    The first copy, and under FSDP1 every one, is complete when `copy` returns. On CUDA later ones run on a stream of their own,
    beside the next forward and backward, which only read what is copied (torchtitan/trainer.py waits before its update, too).
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_cuda = device, device.type == "cuda"
        self.staged: Tensors = {}
        options = StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
        )
        self.stager = DefaultStager(options)
        self.stream = torch.Stream(device) if on_cuda else None
        self.copied: torch.Event | None = None

    def copy(self, tensors: Tensors) -> Tensors:
        """Copies with the same placements; complete after `wait`, and valid until the next call."""
        # torch's stager does not support FSDP1's ShardedTensors; its older one does, but allocates each time.
        fsdp1 = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, private("ShardedTensor"))}
        others = {name: tensor for name, tensor in tensors.items() if name not in fsdp1}
        if self.staged.keys() != others.keys():
            self.staged = self.stager.stage(others)  # type: ignore[assignment]
        else:  # the stager would build every DTensor again, which takes half as long as the copy on a CPU
            if self.stream is not None:
                self.stream.wait_stream(torch.accelerator.current_stream(self.device))
            with torch.no_grad(), self.stream or contextlib.nullcontext():
                for name, tensor in others.items():
                    mine, copy = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, self.staged[name]))
                    copy.copy_(mine, non_blocking=True)
            self.copied = None if self.stream is None else self.stream.record_event()
        return {**self.staged, **BlockingAsyncStager().stage(fsdp1)}  # type: ignore[dict-item]

    def make_device_wait(self) -> None:
        """Let what the device is given from now on wait for the last copy."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.copied)

    def wait(self) -> None:
        """Wait for the last copy."""
        if self.copied is not None:
            self.copied.synchronize()

    def close(self) -> None:
        """Free the host memory."""
        self.wait()
        self.staged = {}
        self.stager.close()
