"""One run of `growth.py`, on every rank: `growth_side.py CONFIG.json`; rank 0 prints one JSON line of figures.

The config has the dotted `flags` of a causal model's run. The collectives of the second step are counted; later steps are timed.

A collective's bytes are those that a rank receives or sends in a ring: what a gather adds to the rank's part, what a scatter
takes from the full tensor, twice that for an all-reduce. FSDP's minimum is that of each unit gathered for the forward pass and,
except for the root, which stays gathered, once more for the backward pass; and of its gradient, scattered once.
"""

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.measuring import memory_gib
from toolkit import finetune, load_config
from toolkit.distributed.comm import rank, world_size
from toolkit.parallel.wrap import ShardedModel, shard_model
from toolkit.training import model as model_phase
from toolkit.training.user_functions import StepInfo

COUNTED_STEP = 2


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that this rank starts, by name, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators come back here
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._opname:
            name = func._opname.strip("_")
            sizes = [tensor.nbytes for tensor in tree_iter((args, result)) if isinstance(tensor, torch.Tensor)]
            share = (world_size() - 1) / world_size()
            self.calls[name] += 1
            self.num_bytes[name] += int(max(sizes, default=0) * share * (2 if "reduce" in name and "scatter" not in name else 1))
        return result


def minimum_bytes(sharded: ShardedModel) -> float:
    """Bytes of a step with one micro-batch, by the formula at the top of this file."""
    policy = sharded.model._get_fsdp_state()._mp_policy  # type: ignore[attr-defined]
    total = 0.0
    for unit in sharded.units:
        param_bytes = policy.param_dtype.itemsize if policy.param_dtype else 4
        gradient_bytes = (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
        total += unit.num_parameters * param_bytes * (2 if unit.name else 1) + unit.num_trainable * gradient_bytes
    return total * (world_size() - 1) / world_size()


def main() -> None:
    config = load_config("llm", overrides=json.loads(Path(sys.argv[1]).read_text())["flags"])
    counter, seconds, clock = CollectiveCounter(), [], [0.0]
    models: list[ShardedModel] = []
    figures: dict[str, Any] = {}

    def keep(*args: Any, **options: Any) -> ShardedModel:
        models.append(shard_model(*args, **options))
        return models[0]

    def after_step(info: StepInfo) -> None:
        if info.step == COUNTED_STEP - 1:
            counter.__enter__()
        elif info.step == COUNTED_STEP:
            counter.__exit__(None, None, None)
        elif info.step > COUNTED_STEP + 1:
            seconds.append(time.perf_counter() - clock[0])
        clock[0] = time.perf_counter()
        if info.step == info.num_steps:
            is_sharded = world_size() > 1
            figures.update(
                num_parameters=sum(unit.num_parameters for unit in models[0].units),
                step_s=statistics.median(seconds),
                peak_gib=memory_gib("VmHWM"),
                calls=sum(counter.calls.values()),
                num_bytes=sum(counter.num_bytes.values()),
                minimum_bytes=minimum_bytes(models[0]) if is_sharded else 0.0,
                by_name={name: [counter.calls[name], counter.num_bytes[name]] for name in counter.calls},
                is_first=rank() == 0,
            )

    with mock.patch.object(model_phase, "shard_model", keep):
        finetune(config, after_step=after_step)
    if figures.pop("is_first"):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
