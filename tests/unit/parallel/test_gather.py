"""Where parameters are gathered: on the device, by its backend, also where CPU offload keeps the shards on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.parallel.gather import whole_parameters
from toolkit.tools.plan.trace import fake_ranks


class Gathers(TorchDispatchMode):
    """Records the kind of device of each all-gather's input, by which c10d chooses the backend."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.devices.append(args[0].device.type)
        return func(*args, **(kwargs or {}))


def test_offloaded_shards_are_gathered_on_the_device() -> None:
    """The meta device stands in for a GPU; `plain` shards on the CPU are those that CPU offload keeps there."""
    with fake_ranks(2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded: Any = SimpleNamespace(model=model, plain=model, accelerator=SimpleNamespace(device=torch.device("meta")))
        with Gathers() as gathers:
            whole = dict(whole_parameters(sharded))
    assert gathers.devices == ["meta", "meta"]
    assert {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in whole.items()} == {
        "weight": ("meta", (4, 4)),
        "bias": ("meta", (4,)),
    }
