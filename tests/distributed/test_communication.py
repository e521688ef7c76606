"""What ranks gather and reduce: once a step what they can, never what an evaluation has left, and how DDP is set up."""

import contextlib
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.adapter_models import adapted, save_base
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import T5_CONFIG
from tests.support.workbench import FP32
from toolkit.launch.accelerator import build_accelerator
from toolkit.parallel.gather import evaluation_model, generation_ready
from toolkit.parallel.wrap import accumulating, shard_model
from toolkit.training.optim import clip_gradients

NUM_MICRO_BATCHES = 3
COLLECTIVES = ("all_reduce", "reduce_scatter_single", "all_gather_single")


def build_t5(accelerator):
    torch.manual_seed(0)
    return shard_model(accelerator, T5ForConditionalGeneration(T5Config(**T5_CONFIG | {"dropout_rate": 0.0})))


def count_plain_and_wrapped() -> list[dict]:
    accelerator = build_accelerator()
    return [count_collectives(accelerator, wraps) for wraps in (False, True)]


def count_collectives(accelerator, wraps: bool) -> dict:
    """On every rank: two steps of several micro-batches; the collectives of the second, and the norm of its gradient."""
    sharded = build_t5(accelerator)
    for _ in range(2):
        counting = {name: Mock(wraps=getattr(dist, name)) for name in COLLECTIVES}
        sharded.model.zero_grad()
        with patch.multiple(dist, **counting):
            for number in range(NUM_MICRO_BATCHES):
                ids = torch.arange(8).reshape(2, 4) + 10 * number + dist.get_rank()
                is_last = number == NUM_MICRO_BATCHES - 1
                with accumulating(sharded, is_last=is_last) if wraps else contextlib.nullcontext():
                    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    gradients = [p.grad.to_local() for p in sharded.model.parameters() if isinstance(p.grad, DTensor)]
    assert len(gradients) > 10
    return {
        **{name: counted.call_count for name, counted in counting.items()},
        "local_sums": [gradient.double().sum().item() for gradient in gradients],
        "norm": clip_gradients(sharded.model, None).item(),
    }


@pytest.mark.parametrize(("preset", "once"), [("fsdp2_hsdp", "all_reduce"), ("fsdp2_shard_grad_op", "all_gather_single")])
def test_a_step_communicates_once_what_it_can(preset, once):
    for before, after in run_on_ranks(
        count_plain_and_wrapped, preset=preset, overrides=GPU_PRESET_OVERRIDES_ON_CPU[preset] | FP32
    ):
        assert before[once] == NUM_MICRO_BATCHES * after[once] > 0, (before, after)
        assert before["reduce_scatter_single"] == after["reduce_scatter_single"] > 0
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-5)
        assert after["local_sums"] == pytest.approx(before["local_sums"], rel=1e-4, abs=1e-4)


def logits_after_a_change() -> list[list[float]]:
    """On every rank: generate by the sharded model, change all weights, and compute logits sharded and unsharded."""
    sharded = build_t5(build_accelerator())
    ids = torch.arange(3, 11).reshape(2, 4)
    with torch.no_grad():
        with evaluation_model(sharded, "never") as (model, in_step), generation_ready(sharded, model):
            model.generate(input_ids=ids, max_new_tokens=3, synced_gpus=in_step)
        for parameter in sharded.model.parameters():
            parameter.mul_(0.5)
        found = []
        for unshard in ("never", "auto"):
            with evaluation_model(sharded, unshard) as (model, _):
                found.append(model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits[0, :, :8].flatten().tolist())
    return found


def test_generation_leaves_no_gather_behind():
    for sharded, unsharded in run_on_ranks(logits_after_a_change, preset="fsdp2_cpu", overrides=FP32):
        assert sharded == pytest.approx(unsharded, rel=1e-5, abs=1e-6)


class Casts(TorchDispatchMode):
    """Counts casts of bf16 hidden states to fp32: norms make one, LoRA layers none."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.float32
        self.count += is_cast and args[0].dtype == torch.bfloat16 and args[0].shape[-1] in (16, 32) and args[0].dim() == 3
        return function(*args, **(kwargs or {}))


def look_at_ddp(base: Path) -> dict:
    """On every rank: wrap an adapted model as on GPUs, do one step, and look."""
    accelerator = build_accelerator()
    # Take the branch of accelerate that GPUs take. The model's device stays the CPU.
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    given = {}
    build = DistributedDataParallel.__init__

    def record(self, module, device_ids=None, output_device=None, **kwargs) -> None:
        given.update(kwargs, device_ids=device_ids)
        build(self, module, device_ids=None, **kwargs)

    with patch.object(DistributedDataParallel, "__init__", record):
        sharded = shard_model(accelerator, adapted(base, "llama", target_modules="all-linear").train())
    ids = torch.arange(8).reshape(2, 4)
    with Casts() as casts:
        loss = sharded.model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {
        **{name: given[name] for name in ("device_ids", "gradient_as_bucket_view")},
        "syncs_buffers": sharded.model.forward_sync_buffers,
        "num_casts": casts.count,
        "num_norms": sum(type(module).__name__ == "LlamaRMSNorm" for module in sharded.model.modules()),
        "is_finite": bool(loss.isfinite()),
    }


def test_ddp_is_set_up_for_gpus(tmp_path):
    base = save_base(tmp_path / "llama", "llama")
    once_a_norm = {"num_casts": 5, "num_norms": 5}
    expected = {"device_ids": None, "gradient_as_bucket_view": True, "syncs_buffers": False, "is_finite": True} | once_a_norm
    for found in run_on_ranks(look_at_ddp, preset="ddp_cpu", overrides={"mixed_precision": "bf16"}, args=(base,)):
        assert found == expected
