"""As `toolkit/private.py`, of what only tools rely on: the planner watches how FSDP2 allocates."""

import functools
from typing import Any
from unittest import mock

from toolkit import private as core

NAMES = core.listed(
    ("torch", "testing._internal.distributed.fake_pg.FakeStore _subclasses.fake_tensor.FakeTensorMode", "the memory plan"),
    ("torch.utils", "_python_dispatch.TorchDispatchMode _pytree.tree_leaves", "the memory plan"),
    (
        "torch",
        "_C._current_graph_task_id Tensor._is_view ops.c10d._allgather_base_ ops.c10d._reduce_scatter_base_",
        "the memory plan",
    ),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_collectives.DefaultAllocMixin.allocate", "the memory plan"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty FSDPParam._unsharded_param", "the memory plan"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.alloc_all_gather_outputs", "the memory plan"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.init_unsharded_param", "the memory plan"),
    ("torch", "cuda._is_in_bad_fork", "ranks that are forks"),
    ("transformers", "integrations.moe._can_use_grouped_mm", "the memory plan"),
)
FAKE_POINTER_READ = "Accessing the data pointer of FakeTensor"  # by a copy; nothing reads what is there

private = functools.partial(core.find, core.NAMES | NAMES)


def replaced(name: str, replacement: Any) -> Any:
    """Context in which a listed name is `replacement`."""
    private(name)
    return mock.patch(f"{NAMES[name][0]}.{name}", replacement)
