"""How DDP is set up: one copy of the gradients, no buffers sent, no device by local rank, and no casts around LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.adapter_models import save_base
from tests.support.launch import run_on_ranks


def look_at_ddp(base: Path) -> dict[str, Any]:
    """On every rank: wrap an adapted model as on GPUs, do one step, and look."""
    from unittest.mock import patch

    import torch
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.support.adapter_models import adapted
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.wrap import shard_model

    class Casts(TorchDispatchMode):
        """Counts casts of bf16 hidden states to fp32: norms make one, LoRA layers none."""

        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.float32
            self.count += is_cast and args[0].dtype == torch.bfloat16 and args[0].shape[-1] in (16, 32) and args[0].dim() == 3
            return function(*args, **(kwargs or {}))

    accelerator = build_accelerator()
    # Take the branch of accelerate that GPUs take. The model's device stays the CPU.
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    given: dict[str, Any] = {}
    build = DistributedDataParallel.__init__

    def record(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        given.update(kwargs, device_ids=device_ids)
        build(self, module, device_ids=None, **kwargs)

    with patch.object(DistributedDataParallel, "__init__", record):
        sharded = shard_model(accelerator, adapted(base, "llama", target_modules="all-linear").train())
    ids = torch.arange(8).reshape(2, 4)
    with Casts() as casts:
        loss = sharded.model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: given[name] for name in ("device_ids", "gradient_as_bucket_view")}
    return {
        **found,
        "syncs_buffers": sharded.model.forward_sync_buffers,
        "num_casts": casts.count,
        "num_norms": sum(type(module).__name__ == "LlamaRMSNorm" for module in sharded.model.modules()),
        "is_finite": bool(loss.isfinite()),
    }


def test_ddp_is_set_up_for_gpus(tmp_path: Path) -> None:
    base = save_base(tmp_path / "llama", "llama")
    for found in run_on_ranks(look_at_ddp, preset="ddp_cpu", overrides={"mixed_precision": "bf16"}, args=(base,)):
        assert found["device_ids"] is None
        assert found["gradient_as_bucket_view"] and not found["syncs_buffers"]
        assert found["is_finite"]
        assert found["num_casts"] == found["num_norms"] == 5
