"""Ranks, and the few small collectives that the toolkit needs.

Every function here that talks to other ranks says "Collective." and runs on a separate gloo group on the CPU: it never waits
for the device, and its timeout is independent of the device backend's.
"""

import datetime
import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from toolkit.errors import UserError, as_user_error
from toolkit.private import private

T = TypeVar("T")

# Ranks wait in a collective of this group while one tokenizes or exports, which can take days. `watchdog` ends a run that hangs,
# and names the rank. The limit is torch's: it passes milliseconds to the system in 32 bits.
CONTROL_TIMEOUT = datetime.timedelta(days=20)


def rank() -> int:
    """This process's data-parallel rank. It is the global rank: all accepted strategies are data parallel only."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The data-parallel size: the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def limit_groups(timeout: datetime.timedelta) -> None:
    """Make `timeout` the default of every process group that is created from now on.

    The groups of an HSDP mesh (torch/distributed/device_mesh.py:586) and of FSDP1's hybrid shards (fsdp/_init_utils.py:212) are
    created without a timeout. They would get torch's own (distributed_c10d.py:836): 10 minutes under nccl, 30 under gloo.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        private(name)
        setattr(dist.distributed_c10d, name, timeout)


def build_group() -> dist.ProcessGroup | None:
    """A gloo group over all ranks, for one thread: two must not use a group at once. None for one process. Collective."""
    if world_size() == 1:
        return None
    group: Any = dist.new_group(backend="gloo")  # it gets as long to connect as `limit_groups` says
    group.set_timeout(CONTROL_TIMEOUT)
    return group


control_group = functools.lru_cache(maxsize=1)(build_group)
"""The main thread's, for decisions and small objects. Collective on first use, in `build_accelerator`."""


def close_groups() -> None:
    """End the threads of the groups above, after the last collective of a finished run. Collective.

    A gloo thread may still hold the tensors of the last collective. If it releases them while Python finalizes, the process
    aborts ("terminate called without an active exception"), as seen after a successful run.
    """
    control_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # drop the last references, so that the groups end and join their threads


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, in rank order, on every rank. Uses the control group unless another is given. Collective."""
    group = group or control_group()
    if group is None:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T) -> T:
    """Rank 0's `value`, on every rank. Collective."""
    group = control_group()
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def reduce_on_cpu(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """`values` (any shape, on the CPU) reduced over all ranks. Collective."""
    group = control_group()
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values


def raise_together(error: UserError | None) -> None:
    """If any rank has a `UserError`, raise that of the lowest such rank on every rank, and one prints it. Collective."""
    if error is not None and not type(error).__module__.startswith("toolkit."):
        error = UserError(str(error))  # the other ranks may not have a class of the user's own
    first = next((found for found in gather_objects(error) if found is not None), None)
    if first is not None:
        first.printed_by = "run"
        raise first


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank. A `UserError` on any rank, or what the system refused there, is raised on all. Collective."""
    result, error = None, None
    try:
        result = work()
    except Exception as e:
        if (error := as_user_error(e)) is None:
            raise
    raise_together(error)
    return result  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; every rank returns its result, or raises its `UserError`. Collective."""
    return broadcast_object(on_all_ranks(lambda: work() if rank() == 0 else None))  # type: ignore[return-value]
