"""From a model on the CPU to one that is wrapped as the accelerate YAML says, and back to whole parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from toolkit.distributed import watchdog
from toolkit.distributed.comm import reduce_on_cpu, world_size
from toolkit.launch.accelerator import compute_dtype, free_memory_bytes, fsdp_version
from toolkit.models.shard_reader import Sources, fill_shards
from toolkit.parallel import causal_loss, float8
from toolkit.parallel.blocks import checkpoint_activations, compile_blocks
from toolkit.parallel.units import ShardUnit, build_units, check_ties, clean, find_blocks, repeated_blocks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

REPLICA_SHARE_OF_FREE_MEMORY = 0.5
"""`eval.unshard: auto` gathers the model whole where that takes at most this share of every rank's free memory."""


@dataclass(frozen=True)
class ShardedModel:
    """A wrapped model and what is needed to look at it whole."""

    accelerator: Accelerator
    model: nn.Module
    """What forward is called on."""
    plain: PreTrainedModel
    """The transformers model inside."""
    skeleton: PreTrainedModel
    """A weightless, unwrapped twin: structure, ties and buffers."""
    units: list[ShardUnit]


def check_wrap(accelerator: Accelerator, skeleton: nn.Module) -> None:
    """Check the YAML's wrap classes on a weightless model, before the real one loads.

    Raises:
        UserError: a class that is not in the model (those that exist are listed).
    """
    if fsdp_version(accelerator) is not None:
        blocks = find_blocks(accelerator.state.fsdp_plugin, skeleton)
        check_ties(skeleton, build_units(skeleton, blocks))
        if accelerator.mixed_precision == "fp8":
            float8.choose_linears(skeleton, blocks, _num_shards(accelerator))


def shard_model(accelerator: Accelerator, model: PreTrainedModel, sources: Sources | None = None) -> ShardedModel:
    """Wrap the model as the accelerate YAML says: FSDP2, FSDP1, DDP or not at all. Collective.

    With `sources` (FSDP2 only) the model's parameters are on the meta device, and each rank reads its part of them.

    FSDP2 is applied here and not by `accelerator.prepare`: that puts tied embeddings into a unit of their own (T5 then
    fails, as its encoder and decoder hold them too), and checkpoints activations without the dropout state.
    """
    watchdog.working("sharding the model")
    skeleton = weightless_copy(model)
    version = fsdp_version(accelerator)
    blocks = find_blocks(accelerator.state.fsdp_plugin, model) if version else {}
    if accelerator.mixed_precision == "fp8":
        linears = float8.choose_linears(model, blocks, _num_shards(accelerator))
        float8.convert(model, linears, accelerator.ao_recipe_handler.config)
        blocks = {name: model.get_submodule(name) for name in blocks}  # one that was a Linear is another module now
    units = build_units(model, blocks)
    causal_loss.install(model)
    compile_blocks(accelerator, model)
    if version:
        check_ties(model, units)
        checkpoint_activations(accelerator, model)
    assert version == 2 or sources is None
    if version == 2:
        wrapped: nn.Module = _fully_shard(accelerator, model, list(blocks.values()))
        if sources is not None:
            _read_shards(accelerator, wrapped, sources)
    else:
        watchdog.at("sharding the model")  # the weights go over the device
        if version == 1:
            _wrap_exactly(accelerator, list(blocks.values()))
        wrapped = accelerator.prepare_model(model)
    return ShardedModel(accelerator=accelerator, model=wrapped, plain=model, skeleton=skeleton, units=units)


def weightless_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are on the meta device; buffers are copied, ties and frozenness kept."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def whole_parameters(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, in its own dtype, on every rank, one unit at a time. Collective: exhaust it on every rank."""
    if isinstance(sharded.model, FullyShardedDataParallel):
        for module in FullyShardedDataParallel.fsdp_modules(sharded.model):
            prefix = next(clean(name) for name, m in sharded.model.named_modules() if m is module)
            nested = {id(p) for m in FullyShardedDataParallel.fsdp_modules(module)[1:] for p in m.parameters()}
            with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                watchdog.moved()
                for name, parameter in module.named_parameters():
                    if id(parameter) not in nested:
                        yield clean(f"{prefix}.{name}").lstrip("."), parameter.detach()
        return
    for name, parameter in sharded.plain.named_parameters():
        watchdog.moved()
        shard = float8.plain(parameter)
        yield clean(name), shard.full_tensor() if isinstance(shard, DTensor) else shard.detach()


def fits_whole(sharded: ShardedModel) -> bool:
    """Whether a whole copy of the model in its compute dtype fits beside the shards on every rank. Collective.

    The rule: parameters x bytes of the compute dtype, and the largest unit once more in fp32 while it is gathered, at
    most `REPLICA_SHARE_OF_FREE_MEMORY` of the free memory of the rank that has least.
    """
    itemsize = compute_dtype(sharded.accelerator).itemsize
    needed = sum(u.num_parameters for u in sharded.units) * itemsize + max(u.num_parameters for u in sharded.units) * 4
    free = torch.tensor([free_memory_bytes(sharded.accelerator.device)], dtype=torch.int64)
    free = reduce_on_cpu(free, dist.ReduceOp.MIN)
    return needed <= REPLICA_SHARE_OF_FREE_MEMORY * int(free)


def assign_parameters(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put tensors in place of a weightless model's parameters, each under all its aliases."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        parameter = nn.Parameter(weights[names[0]], requires_grad=False)
        for name in names:
            module_name, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module_name), own_name, parameter)


@contextlib.contextmanager
def evaluation_model(sharded: ShardedModel, unshard: str) -> Iterator[tuple[PreTrainedModel, bool]]:
    """The model in evaluation mode, and whether ranks must call it in step. Collective.

    `auto` makes a whole copy in the compute dtype once, where it fits: under FSDP every decoding step would gather every
    block again otherwise, and ranks would have to wait for each other; under autocast every step would cast every weight.
    """
    sharded.model.eval()
    try:
        is_sharded = fsdp_version(sharded.accelerator) is not None
        gains = is_sharded or compute_dtype(sharded.accelerator) != torch.float32
        if unshard == "auto" and gains and fits_whole(sharded):
            yield _replica(sharded), False
        elif not is_sharded:
            yield sharded.plain, False
        else:
            yield sharded.model, True  # type: ignore[misc]
    finally:
        sharded.model.train()
        # FSDP2 leaves units gathered after a forward without a backward; parameters must be shards again for a save.
        for module in sharded.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextlib.contextmanager
def generation_ready(sharded: ShardedModel, model: nn.Module) -> Iterator[None]:
    """Within it `model.generate` works. Collective under FSDP.

    `generate` calls the encoder and not the root, so the root's parameters must be gathered around it: FSDP2 does so for
    a registered method, FSDP1 is told to. The rest is gathered block by block, which needs `synced_gpus`.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            with sharded.accelerator.autocast():
                yield
    elif model is sharded.plain and fsdp_version(sharded.accelerator) is None:
        with sharded.accelerator.autocast():
            yield
    else:
        yield


def _replica(sharded: ShardedModel) -> PreTrainedModel:
    """A plain, whole copy in the compute dtype on this rank's device. Collective."""
    device, dtype = sharded.accelerator.device, compute_dtype(sharded.accelerator)
    replica = weightless_copy(sharded.skeleton)
    # A copy also where dtype and device are right already: FSDP1 takes its gathered memory back.
    weights = {name: whole.to(device=device, dtype=dtype, copy=True) for name, whole in whole_parameters(sharded)}
    assign_parameters(replica, weights)
    causal_loss.install(replica)
    if dtype != torch.float32:
        # Buffers are not cast, so positions may come in fp32 (M2M-100's do): each block gets its inputs as under FSDP2.
        for block in repeated_blocks(replica).values():
            block.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    return replica.to(device).eval()


def _cast_inputs(dtype: torch.dtype, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A forward hook: floating tensors in `dtype`, which is what FSDP2's mixed precision does before a shard unit."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _num_shards(accelerator: Accelerator) -> int:
    """Ranks that a parameter is cut over under FSDP2."""
    parallelism = accelerator.parallelism_config
    return parallelism.dp_shard_size if parallelism is not None else world_size()


def _fully_shard(accelerator: Accelerator, model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """FSDP2 with the YAML's policies: blocks first, then the root with the rest."""
    from torch.distributed.device_mesh import init_device_mesh

    plugin = accelerator.state.fsdp_plugin
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    else:
        mesh = init_device_mesh(accelerator.device.type, (world_size(),))
    # T5's blocks return their position bias, a view; nothing changes it in place, as equal gradients show in the tests.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policies = {"mesh": mesh, "mp_policy": plugin.mixed_precision_policy, "offload_policy": plugin.cpu_offload}
    for block in blocks:
        fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **policies)
    # torch keeps the root gathered between forward and backward: it is needed at the end of one and the start of the other.
    fully_shard(model, **policies)
    _prefetch_by_block(model, blocks)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return model


def _read_shards(accelerator: Accelerator, model: nn.Module, sources: Sources) -> None:
    """Give this rank's shards memory, where FSDP2 wants them, and their values."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    device = torch.device("cpu") if offloads else accelerator.device
    num_parameters = len(list(model.parameters()))
    # Not `to_empty`, which would also empty the buffers. FSDP2's own `_apply` pads and pins the new shards.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    fill_shards(model, sources)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert num_parameters == len(list(model.parameters())), "tied weights came apart"


def _prefetch_by_block(root: Any, blocks: list[nn.Module]) -> None:
    """Let each block gather the next one while it computes, in the order they are called: an encoder comes before its decoder.

    FSDP2 by itself starts the next gather of a forward only when the CPU gets there. Blocks within blocks are left to that: with
    activation checkpointing their forward runs again in the backward, where the block after is done already.
    """
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    if any(id(block) in inside for block in blocks):
        return
    order = [module for module in root.modules() if any(module is block for block in blocks)]
    # A decoder may be registered before its encoder.
    encoder = root.get_encoder() if getattr(getattr(root, "config", None), "is_encoder_decoder", False) else None
    of_encoder = {id(module) for module in encoder.modules()} if encoder is not None else set()
    chain: list[Any] = [root, *sorted(order, key=lambda block: id(block) not in of_encoder)]
    for here, following in itertools.pairwise(chain):
        here.set_modules_to_forward_prefetch([following])
        if here is not root:
            following.set_modules_to_backward_prefetch([here])
    root.set_modules_to_backward_prefetch(chain[1:][-1:])


def _wrap_exactly(accelerator: Accelerator, blocks: list[nn.Module]) -> None:
    """Make accelerate's FSDP1 wrap just these modules."""
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    chosen = {id(block) for block in blocks}
    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen)
