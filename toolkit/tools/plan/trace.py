"""Traces the peak memory of one micro-batch's forward and backward, without weights or a device.

Real code runs: the model's forward, `shard_model`, FSDP2's gathers and reductions. Fake tensors have shapes but no data, and
the process group has ranks but no peers. The order of allocations is the one that `torch.cuda.max_memory_allocated` would see.
Tensors lie on the CPU, so stand-ins (`kernels`) replace what CUDA keeps differently, unless the preset has CPU processes: the
fused attention kernels, which keep no scores, and dropout, whose masks are boolean.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.parallel.units import local_tensor
from toolkit.tools.plan.kernels import kernels_of_cuda
from toolkit.tools.private import private, replaced

SHARDED_PARAMETERS, GRADIENTS, UNSHARDED = "sharded parameters", "gradients", "unsharded block"
UNSHARDED_GRADIENTS, ACTIVATIONS, LOGITS = "unsharded gradients", "activations", "logits and loss"
TEMPORARIES, GATHERED, INPUTS = "temporaries", "gather and reduce buffers", "inputs and buffers"
TRACED_KINDS = (
    SHARDED_PARAMETERS, GRADIENTS, UNSHARDED, UNSHARDED_GRADIENTS, ACTIVATIONS, LOGITS, TEMPORARIES, GATHERED, INPUTS,
)  # fmt: skip
Bytes = dict[str, int]
"""Bytes by kind."""
ALLOCATED_MULTIPLE_BYTES = 512
"""CUDA's caching allocator rounds every tensor up to a multiple of this."""


@dataclass
class Trace:
    """What one micro-batch needs on one rank's device."""

    peaks: list[Bytes]
    """Live bytes by kind at the peak of each phase. Phases end where a stack of blocks begins or ends its forward or its
    backward, so that in models that differ only in the number of blocks, each peak grows linearly with that number."""
    first_backward_phase: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    largest_gather_bytes: int = 0

    @property
    def peak(self) -> Bytes:
        """Live bytes by kind at the highest peak."""
        return max(self.peaks, key=lambda by_kind: sum(by_kind.values()))


@contextlib.contextmanager
def fake_ranks(num_processes: int) -> Iterator[None]:
    """Context with a process group of `num_processes` ranks: this process is rank 0, and the others do not exist."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=private("FakeStore")(), rank=0, world_size=num_processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_copy(model: nn.Module) -> nn.Module:
    """A copy of the model with fake CPU tensors as parameters and buffers; call within a `FakeTensorMode`."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        memo[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(model, memo)


def trace_micro_batch(
    model: nn.Module,
    stacks: list[list[nn.Module]],
    batch: dict[str, Any],
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    vocab_size: int,
    off_device: frozenset[str] = frozenset(),
    is_cpu: bool = False,
) -> Trace:
    """Trace one micro-batch of a model made of fake tensors; call within its `FakeTensorMode`.

    Args:
        stacks: the model's repeated blocks, in the order of each stack's forward.
        loss: takes model and batch, returns the scalar to call backward on.
        vocab_size: tensors with this last dimension count as logits.
        off_device: kinds that lie in host memory and do not count (`GRADIENTS` under CPU offload).
        is_cpu: the run will use CPU kernels too, so they stay.
    """
    # What exists before the forward, and where gradients appear.
    tracker = _Tracker(vocab_size, off_device, is_cpu)
    for parameter in model.parameters():
        tracker.tag(local_tensor(parameter), SHARDED_PARAMETERS)
        if parameter.grad is not None:
            tracker.tag(local_tensor(parameter.grad), GRADIENTS)
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(lambda p: tracker.tag(p.grad, GRADIENTS))
    for value in (*model.buffers(), *batch.values()):
        if isinstance(value, torch.Tensor):
            tracker.tag(value, INPUTS)

    def end_phases(block: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """End a phase before this block's forward, and one after its backward."""
        tracker.end_phase()
        hidden = next((x for x in (*args, *inputs.values()) if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if hidden is not None:
            hidden.register_hook(lambda _: tracker.end_phase())

    # A phase ends at the second and at the last block of each stack.
    for block in {id(block): block for stack in stacks for block in (stack[min(1, len(stack) - 1)], stack[-1])}.values():
        block.register_forward_pre_hook(end_phases, with_kwargs=True)
    with _watched(tracker), contextlib.nullcontext() if is_cpu else kernels_of_cuda(), tracker:
        loss_sum = loss(model, batch)
        tracker.end_phase()
        tracker.trace.first_backward_phase = len(tracker.trace.peaks) - 1
        loss_sum.backward()
        tracker.end_phase()  # what is left for the optimizer
    return tracker.trace


_DispatchMode: Any = private("TorchDispatchMode")


class _Tracker(_DispatchMode):
    """Counts the bytes of every storage while it is alive."""

    def __init__(self, vocab_size: int, off_device: frozenset[str], is_cpu: bool) -> None:
        super().__init__()
        self.vocab_size, self.off_device, self.is_cpu = vocab_size, off_device, is_cpu
        self.alive: dict[int, tuple[str, int, weakref.ref]] = {}
        self.now = dict.fromkeys(TRACED_KINDS, 0)
        self.total = self.highest = 0
        self.trace = Trace([dict(self.now)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the call comes again with the local tensors
        if func is torch.ops.aten.add.Tensor and _in_backward() and all(isinstance(of, torch.Tensor) for of in args):
            first, second = args
            is_alike = first.shape == second.shape and torch.promote_types(first.dtype, second.dtype) == first.dtype
            if (
                is_alike and not private("_is_view", first)()
            ):  # whose base has the storage too (input_buffer.cpp, can_accumulate_inplace)
                return first  # autograd accumulates a gradient in place, but not for fake tensors
        result = func(*args, **(kwargs or {}))
        # Collectives: their buffers and traffic.
        if func is private("_allgather_base_").default:
            self.tag(args[0], GATHERED)
            self.trace.gathered_bytes += args[0].nbytes
            self.trace.largest_gather_bytes = max(self.trace.largest_gather_bytes, args[0].nbytes)
        elif func is private("_reduce_scatter_base_").default:
            self.tag(args[1], GATHERED)
            self.tag(args[0], GRADIENTS)
            if self.is_cpu:  # gloo reduces a copy
                self.tag(torch.empty_like(args[1]), GATHERED)
            self.trace.reduced_bytes += args[1].nbytes
        # Everything else.
        for leaf in private("tree_leaves")(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
                self._see(leaf)
        return result

    def tag(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the tensor's storage under `kind`, whether it was counted before or not."""
        storage = tensor.untyped_storage()
        self._forget(_key(storage))
        self._count(storage, kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a known storage with its new size."""
        if (key := _key(storage)) in self.alive:
            kind = self.alive[key][0]
            self._forget(key)
            self._count(storage, kind)

    def end_phase(self) -> None:
        """Start a new phase, with a peak of its own."""
        self.highest = self.total
        self.trace.peaks.append(dict(self.now))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if _key(storage) in self.alive:
            return
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self.vocab_size
        self._count(storage, LOGITS if is_logits else TEMPORARIES if _in_backward() else ACTIVATIONS)

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = _key(storage)
        num_bytes = -(-storage.nbytes() // ALLOCATED_MULTIPLE_BYTES) * ALLOCATED_MULTIPLE_BYTES
        num_bytes = 0 if kind in self.off_device else num_bytes
        self.alive[key] = kind, num_bytes, weakref.ref(storage, lambda _: self._forget(key))
        self.now[kind] += num_bytes
        self.total += num_bytes
        if self.total >= self.highest:  # equal: the last tensor changed its kind
            self.highest = self.total
            self.trace.peaks[-1] = dict(self.now)

    def _forget(self, key: int) -> None:
        if key in self.alive:
            kind, num_bytes, _ = self.alive.pop(key)
            self.now[kind] -= num_bytes
            self.total -= num_bytes


@contextlib.contextmanager
def _watched(tracker: _Tracker) -> Iterator[None]:
    """Context that reports FSDP2's buffers to the tracker, each with its kind.

    FSDP2 frees and allocates gathered parameters by resizing storages, which a dispatch mode does not see.
    """
    resize, allocate = torch.UntypedStorage.resize_, private("allocate")
    unshard, initialize = private("alloc_all_gather_outputs"), private("init_unsharded_param")

    # Wrappers around what allocates FSDP2's buffers; each tags its result.
    def seen_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    def seen_allocate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = allocate(self, *args, **kwargs)
        tracker.tag(buffer, GATHERED)
        return buffer

    def seen_unshard(self: Any) -> None:
        unshard(self)
        for tensor in self.all_gather_outputs:
            tracker.tag(tensor, UNSHARDED)

    def seen_initialize(self: Any) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        initialize(self)
        for tensor in self.all_gather_outputs:  # with one rank there is no gather
            tracker.tag(tensor, UNSHARDED)
        if is_first and (parameter := private("_unsharded_param", self)).requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: tracker.tag(p.grad, UNSHARDED_GRADIENTS))

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", seen_resize),
        replaced("allocate", seen_allocate),
        replaced("alloc_all_gather_outputs", seen_unshard),
        replaced("init_unsharded_param", seen_initialize),
    ):
        yield


def _key(storage: torch.UntypedStorage) -> int:
    return int(private("_cdata", storage))


def _in_backward() -> bool:
    """Whether a backward runs. A checkpointed block's recomputed forward records gradients, and does not count."""
    return private("_current_graph_task_id")() != -1 and not torch.is_grad_enabled()
