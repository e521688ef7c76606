"""Gathers a sharded model's parameters: one at a time for an export, all or block by block for an evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from toolkit.distributed.comm import reduce_on_cpu
from toolkit.distributed.device import free_memory_bytes
from toolkit.distributed.watchdog import heartbeat
from toolkit.launch.accelerator import compute_dtype, cudnn_attention, fsdp_version
from toolkit.models.freeze import aliases
from toolkit.models.patches import chunked_loss, fused, masks
from toolkit.models.quantized import dequantize_layers, dequantized, is_quantized
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.parallel.compute_copies import cast_inputs, run_within
from toolkit.parallel.float8 import plain
from toolkit.parallel.units import clean_name, repeated_blocks
from toolkit.parallel.wrap import ShardedModel, forget_forwards, gathered_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPLICA_SHARE_OF_FREE_MEMORY = 0.5
"""`eval.unshard: auto` gathers the full model if that takes at most this share of every rank's free memory."""


@torch.no_grad()
def unsharded_parameters(sharded: ShardedModel, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, or those of `names`, unsharded, in its own dtype, on every rank's device, one unit at a time. Collective:
    exhaust it on every rank."""
    if isinstance(sharded.model, FullyShardedDataParallel):
        for module in FullyShardedDataParallel.fsdp_modules(sharded.model):
            prefix = next(clean_name(name) for name, m in sharded.model.named_modules() if m is module)
            nested = {id(p) for m in FullyShardedDataParallel.fsdp_modules(module)[1:] for p in m.parameters()}
            with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                heartbeat()
                for name, parameter in module.named_parameters():
                    own = clean_name(f"{prefix}.{name}").lstrip(".")
                    if id(parameter) not in nested and (names is None or own in names):
                        yield own, parameter.detach()
        return
    for name, parameter in sharded.unwrapped.named_parameters():
        if names is not None and clean_name(name) not in names:
            continue
        heartbeat()
        # With CPU offload the shard lies on the host, where it would be gathered by gloo.
        shard = plain(parameter).to(sharded.accelerator.device)
        yield clean_name(name), shard.full_tensor() if isinstance(shard, DTensor) else shard.detach()


def fits_whole(sharded: ShardedModel, skeleton: nn.Module) -> bool:
    """Whether an unsharded copy of `skeleton`, the model with or without codes, fits beside the shards on every rank. Collective.

    The rule: its parameters in the compute dtype, codes and scales as they are, plus the largest unit in fp32 while it is
    gathered, take at most `REPLICA_SHARE_OF_FREE_MEMORY` of the free memory of the rank that has least.
    """
    itemsize = compute_dtype(sharded.accelerator).itemsize
    needed = sum(p.numel() * (itemsize if p.is_floating_point() else p.itemsize) for p in skeleton.parameters())
    needed += max(u.num_parameters for u in sharded.units) * 4
    free = torch.tensor([free_memory_bytes(sharded.accelerator.device)], dtype=torch.int64)
    free = reduce_on_cpu(free, dist.ReduceOp.MIN)
    return needed <= REPLICA_SHARE_OF_FREE_MEMORY * int(free)


def assign_parameters(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Replace the parameters of a model on the meta device by `weights`, each under all its aliases."""
    for names in aliases(model).values():
        parameter = nn.Parameter(weights[names[0]], requires_grad=False)
        for name in names:
            module_name, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module_name), own_name, parameter)


@contextlib.contextmanager
def evaluation_model(sharded: ShardedModel, unshard: str) -> Iterator[tuple[PreTrainedModel, bool]]:
    """The model in evaluation mode, and whether ranks must call it in step. Collective.

    `auto` makes one unsharded copy in the compute dtype, if it fits. Without it, every decoding step under FSDP would gather
    every block again, with ranks waiting for each other, and every step in bf16 would copy every weight. A quantized base
    is dequantized once in it, or, if only that fits, stays in codes. `once` calls the sharded model, as `never` does; if it fits
    unsharded, FSDP2 gathers it for the first forward alone.
    """
    sharded.model.eval()
    try:
        is_sharded = fsdp_version(sharded.accelerator) is not None
        has_codes = is_quantized(sharded.skeleton)
        gains = is_sharded or has_codes or compute_dtype(sharded.accelerator) != torch.float32
        ways = [dequantized_copy, copy_on_meta] if has_codes else [copy_on_meta]  # dequantized, it computes faster
        skeletons = (way(sharded.skeleton) for way in ways if unshard == "auto" and gains)
        if (skeleton := next((each for each in skeletons if fits_whole(sharded, each)), None)) is not None:
            yield _replica(sharded, skeleton), False
        elif not is_sharded:
            yield sharded.unwrapped, False
        else:
            is_kept = unshard == "once" and fits_whole(sharded, sharded.skeleton)
            with gathered_once(sharded) if is_kept else contextlib.nullcontext():
                yield sharded.model, True  # type: ignore[misc]
    finally:
        sharded.model.train()
        forget_forwards(sharded.model)


@contextlib.contextmanager
def generation_ready(sharded: ShardedModel, model: nn.Module) -> Iterator[None]:
    """Context in which `model.generate` works. Collective under FSDP.

    `generate` calls the encoder and not the root, so the root's parameters must be gathered around it. FSDP2 does that for a
    registered method; FSDP1 needs `summon_full_params`. The rest is gathered block by block, which needs `synced_gpus`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cudnn_attention(False))
        if isinstance(model, FullyShardedDataParallel):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False))
        if model is sharded.unwrapped:
            stack.enter_context(sharded.computing())
        yield


def dequantized_copy(skeleton: PreTrainedModel) -> PreTrainedModel:
    """A copy of a skeleton that has plain layers in the places of quantized ones."""
    dequantize_layers(copy := copy_on_meta(skeleton))
    return copy


def _replica(sharded: ShardedModel, replica: PreTrainedModel) -> PreTrainedModel:
    """An unsharded copy without wrappers, in the compute dtype, on this rank's device; `replica` is its skeleton. Collective."""
    device, dtype = sharded.accelerator.device, compute_dtype(sharded.accelerator)
    wholes = unsharded_parameters(sharded)
    if not is_quantized(replica):
        wholes = dequantized(wholes, sharded.skeleton)
    # Copy even if dtype and device already match: FSDP1 frees its gathered memory.
    weights = {name: w.to(device, dtype if w.is_floating_point() else w.dtype, copy=True) for name, w in wholes}
    assign_parameters(replica, weights)
    chunked_loss.install(replica, sharded.max_logits)
    masks.install(replica)
    if sharded.max_logits is not None:  # a GPU
        fused.install(replica)
    if sharded.autocasts:
        run_within(replica, functools.partial(torch.autocast, device.type, dtype))
    if dtype != torch.float32:
        # Buffers are not cast, so positions may be fp32 (M2M-100's are): cast each block's inputs, as FSDP2 does.
        for block in repeated_blocks(replica).values():
            block.register_forward_pre_hook(functools.partial(cast_inputs, dtype), with_kwargs=True)
    return replica.to(device).eval()
