"""Wraps a model as the accelerate YAML says: FSDP2, FSDP1, DDP, or not at all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from toolkit.config.schema import Checkpointing
from toolkit.distributed.comm import world_size
from toolkit.distributed.device import smallest_gpu_bytes
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.launch.accelerator import compute_dtype, fsdp_mesh, fsdp_version
from toolkit.launch.environment import checkpoints_activations
from toolkit.models.experts import expert_counts
from toolkit.models.patches import chunked_loss, fused, masks
from toolkit.models.patches.experts import Route, routes_noted
from toolkit.models.tensor_reader import TensorReaders, allocate, copy_on_meta, fill_parameters
from toolkit.parallel.blocks import checkpoint_activations, choose_checkpointing, compile_blocks, compiles
from toolkit.parallel.compute_copies import ComputeCopies, mixes_dtypes, run_within
from toolkit.parallel.float8 import choose_linears, convert
from toolkit.parallel.units import ShardUnit, build_units, check_ties, find_blocks, find_ends, find_towers, repeated_blocks
from toolkit.private import VIEW_RETURNED, private

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ShardedModel:
    """A wrapped model, and what it takes to gather it."""

    accelerator: Accelerator
    model: nn.Module
    """The wrapped module: call forward on this."""
    unwrapped: PreTrainedModel
    """The transformers model inside."""
    skeleton: PreTrainedModel
    """An unwrapped copy on the meta device: structure, ties and buffers."""
    units: list[ShardUnit]
    max_logits: int | None
    """Most elements of one chunk's logits, as in `chunked_loss.install`."""
    stored: TensorReaders
    """The weights that the model has in codes, by their names in a plain one, as their files have them."""
    rounded: list[nn.Parameter]
    """Trainable parameters in bf16."""
    routes: dict[str, list[Route]]
    """Where blocks note the routes of their last forward, with an auxiliary loss."""
    autocasts: bool = False
    """Whether the model's forward casts each product's operands, as its own code mixes dtypes."""
    copies: ComputeCopies | None = None
    """The weights that compute, where no FSDP gathers them in the compute dtype."""

    def computing(self) -> AbstractContextManager[Any]:
        """Context for a forward with its backward, or for calls of parts of the model."""
        return self.copies.held() if self.copies is not None else contextlib.nullcontext()


def check_wrap(accelerator: Accelerator, skeleton: nn.Module, checkpointing: Checkpointing) -> None:
    """Check the YAML's wrap classes and what blocks recompute on a model on the meta device, before the real one loads. A class
    that is not in the model (those that exist are listed), a weight that is tied across units, no Linear that can train in
    float8, or `checkpointing` that does not go with the accelerate YAML is a `UserError`."""
    asked = {"in_accelerate_yaml": checkpoints_activations(), "is_compiled": compiles(accelerator)}
    choose_checkpointing(checkpointing, **asked)
    blocks = _find_blocks(accelerator, skeleton, checkpointing)
    if fsdp_version(accelerator) is not None:
        check_ties(skeleton, build_units(skeleton, blocks))
    if accelerator.mixed_precision == "fp8":
        choose_linears(skeleton, blocks, _num_shards(accelerator))


def shard_model(
    accelerator: Accelerator,
    model: PreTrainedModel,
    readers: TensorReaders | None = None,
    gpu_bytes: int = 0,
    notes: bool = False,
    checkpointing: Checkpointing = "none",
) -> ShardedModel:
    """Wrap the model as the accelerate YAML says: FSDP2, FSDP1, DDP or not at all. With `notes`, blocks note routes. Collective.

    With `readers`, the model's parameters are on the meta device, and each rank reads what it holds of them; without, the model
    has its values. `gpu_bytes` is a planned GPU's memory; without it the ranks' devices are asked. `checkpointing` is what blocks
    recompute; the accelerate YAML may ask for all of it.

    FSDP2 is applied here and not by `accelerator.prepare`, which puts tied embeddings into a unit of their own (T5 then
    fails, because its encoder and decoder hold them too), and checkpoints activations without the dropout state.
    """
    # What is gathered together, and what trains in float8.
    enter_phase("sharding the model", counts_cpu=True)
    skeleton = copy_on_meta(model)
    version = fsdp_version(accelerator)
    blocks = _find_blocks(accelerator, model, checkpointing)
    if accelerator.mixed_precision == "fp8":
        linears = choose_linears(model, blocks, _num_shards(accelerator))
        convert(model, linears, accelerator.ao_recipe_handler.config)
        blocks = {name: model.get_submodule(name) for name in blocks}  # a block that was a Linear has been replaced
    wrapped_alone = blocks | find_ends(model, blocks) if version else {}
    uncalled = list(find_towers(model).values())
    units = build_units(model, wrapped_alone)
    # Changes to forwards come before wrapping, so that FSDP's hooks stay outside.
    memory_bytes = gpu_bytes or smallest_gpu_bytes(accelerator.device)
    max_logits = chunked_loss.max_logits_at_once(memory_bytes) if memory_bytes else None
    chunked_loss.install(model, max_logits)
    masks.install(model)
    if memory_bytes:  # a GPU, or a planned one
        fused.install(model)
    dtype = compute_dtype(accelerator)
    autocasts = dtype != torch.float32 and mixes_dtypes(skeleton, dtype)
    if autocasts:
        run_within(model, functools.partial(torch.autocast, accelerator.device.type, dtype))
    if version:
        check_ties(model, units)
    with routes_noted(model, repeated_blocks(model) if notes else {}) as routes:
        compile_blocks(accelerator, model)
        checkpoint_activations(accelerator, model, checkpointing)
    # Wrap: FSDP2 here; FSDP1, DDP and single process by accelerate.
    if version == 2:
        wrapped: nn.Module = _fully_shard(accelerator, model, list(wrapped_alone.values()), uncalled)
        if readers is not None:
            _read_shards(accelerator, wrapped, readers)
    else:
        if readers is not None:  # FSDP1 moves one unit at a time to the device
            allocate(model, torch.device("cpu") if version == 1 else accelerator.device)
            fill_parameters(model, readers)
        enter_phase("sharding the model")  # weights move through the device
        if version == 1:
            chosen = {id(module) for module in wrapped_alone.values()}
            policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen)
            accelerator.state.fsdp_plugin.auto_wrap_policy = policy
        wrapped = accelerator.prepare_model(model)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.forward_sync_buffers = False  # training does not change buffers
    named = dict(skeleton.named_parameters())
    stored = {name: reader for name, reader in (readers or {}).items() if name not in named}
    rounded = [p for p in wrapped.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    for parameter in rounded:
        parameter.grad_dtype = None  # any
    copies = ComputeCopies(model, repeated_blocks(model).values(), dtype) if version is None and dtype != torch.float32 else None
    return ShardedModel(accelerator, wrapped, model, skeleton, units, max_logits, stored, rounded, routes, autocasts, copies)


@contextlib.contextmanager
def accumulating(sharded: ShardedModel, *, is_last: bool) -> Iterator[None]:
    """Wrap forward and backward of one micro-batch, so that what a step can reduce once is reduced in its last one.

    DDP then reduces its gradients, and HSDP its shards of them between replicas. FSDP shards gradients after every micro-batch:
    deferring would keep them unsharded. Without `fsdp_reshard_after_forward`, parameters stay gathered until the last backward.
    Gradients in bf16 add up in fp32.
    """
    model = sharded.model
    # torch's setters walk all modules, so they are called where something changes: not in steps of one micro-batch.
    if isinstance(model, FSDPModule) and getattr(model, "_was_last", True) != is_last:
        setattr(model, "_was_last", is_last)  # noqa: B010  # no field that mypy knows
        plugin = sharded.accelerator.state.fsdp_plugin
        # With CPU offload the sum over micro-batches would stay on the GPU until the last one (_fsdp_collectives.py:636).
        model.set_requires_all_reduce(is_last or isinstance(plugin.cpu_offload, CPUOffloadPolicy))
        if not plugin.reshard_after_forward:
            model.set_reshard_after_backward(is_last)
    defers = isinstance(model, DistributedDataParallel) and not is_last
    with sharded.computing(), model.no_sync() if defers else contextlib.nullcontext():  # type: ignore[operator]
        yield
    if not is_last:  # torch and FSDP2 add the next one's in place
        for parameter in sharded.rounded:
            parameter.grad = None if parameter.grad is None else parameter.grad.float()


def reduction_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Groups over which a tensor is reduced one after another to reduce it over all ranks; empty for one process.

    They are the ones over which gradients travel: a step then needs no further communicator over all ranks.
    """
    if world_size() == 1:
        return []
    if isinstance(model, FullyShardedDataParallel):
        replicas = [private("_inter_node_pg", model)] if "HYBRID" in model.sharding_strategy.name else []
        return [cast(dist.ProcessGroup, model.process_group), *replicas]
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return mesh.get_all_groups() if mesh is not None else [cast(dist.ProcessGroup, dist.group.WORLD)]


def forget_forwards(model: Any) -> None:
    """After a forward without a backward, FSDP2 leaves units gathered, and gathers under way: a generation's root asks for the
    encoder, which runs once only. A save needs shards, and a later forward must not take weights from before a change."""
    if isinstance(model, FSDPModule) and private("_is_root", private("_get_fsdp_state", model)()):  # None: no forward yet
        model.reset_iter_state()


@contextlib.contextmanager
def gathered_once(sharded: ShardedModel) -> Iterator[None]:
    """Context in which FSDP2 gathers each unit for the first forward and keeps it for the next ones, which have no backward.
    `forget_forwards` frees all."""
    model, units = sharded.model, []
    if isinstance(model, FSDPModule) and sharded.accelerator.state.fsdp_plugin.reshard_after_forward:
        ends = (model, sharded.unwrapped.get_output_embeddings())  # these stay gathered after a forward anyway
        units = [module for module in model.modules() if isinstance(module, FSDPModule) and module not in ends]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)


def _find_blocks(accelerator: Accelerator, model: nn.Module, checkpointing: Checkpointing) -> dict[str, nn.Module]:
    """What FSDP wraps as its plugin says, or the repeated blocks. torch's selective recomputation must meet the operations of the
    forward in their order: a unit inside a block gathers at other moments, which is a `UserError`."""
    if fsdp_version(accelerator) is None:
        return repeated_blocks(model)
    blocks = find_blocks(accelerator.state.fsdp_plugin, model)
    inside = [unit for unit in blocks for block in repeated_blocks(model) if unit.startswith(f"{block}.")]
    if inside and checkpointing == "selective":
        what = f"train.activation_checkpointing is selective, but {inside[0]} is a shard unit inside a block"
        raise UserError(f"{what}: let fsdp_config wrap whole blocks, or write full")
    return blocks


def _num_shards(accelerator: Accelerator) -> int:
    """Number of ranks that share a parameter under FSDP2."""
    parallelism = accelerator.parallelism_config
    return parallelism.dp_shard_size if parallelism is not None else world_size()


def _fully_shard(accelerator: Accelerator, model: nn.Module, modules: list[nn.Module], uncalled: list[nn.Module]) -> nn.Module:
    """FSDP2 with the YAML's policies: these modules first, then the root with the rest. What no text calls is not prefetched."""
    plugin = accelerator.state.fsdp_plugin
    mesh = fsdp_mesh(accelerator) or init_device_mesh(accelerator.device.type, (world_size(),))
    # T5's blocks return their position bias, a view. Nothing changes it in place: the tests compare gradients.
    warnings.filterwarnings("ignore", message=VIEW_RETURNED)
    policies = {"mesh": mesh, "mp_policy": plugin.mixed_precision_policy, "offload_policy": plugin.cpu_offload}
    policies["shard_placement_fn"] = functools.partial(place_experts, expert_counts(model), mesh.size(-1))
    # The forward ends with the head, and the backward starts with it: it stays gathered between, as torch keeps the root.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in modules:
        fully_shard(module, reshard_after_forward=plugin.reshard_after_forward and module is not head, **policies)
    fully_shard(model, **policies)
    _prefetch_in_order(model, [module for module in modules if module not in uncalled])
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return model


def place_experts(counts: set[int], num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """Cut each expert by rows where ranks cannot have the same number of experts: else some of them would have much less, or
    nothing. FSDP2 cuts no dimension but the first unevenly. None: along the first dimension."""
    is_uneven = parameter.ndim == 3 and parameter.shape[0] in counts and parameter.shape[0] % num_shards
    return Shard(1) if is_uneven and parameter.shape[1] % num_shards == 0 else None


def _read_shards(accelerator: Accelerator, model: nn.Module, readers: TensorReaders) -> None:
    """Allocate this rank's shards on the device that FSDP2 expects, and read their values."""
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    device = torch.device("cpu") if offloads else accelerator.device
    num_parameters = len(list(model.parameters()))
    # Not `to_empty`, which would also empty the buffers. FSDP2's `_apply` pads and pins the new shards.
    private("_apply", model)(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    fill_parameters(model, readers)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert num_parameters == len(list(model.parameters())), "tied weights came apart"


def _prefetch_in_order(root: Any, modules: list[nn.Module]) -> None:
    """Let each unit gather the next one while it computes, in call order: an encoder comes before its decoder.

    By default FSDP2 starts a forward's next gather only when the CPU reaches that unit. Nested ones keep the default: with
    activation checkpointing their forward runs again in the backward, where the next one is already done.
    """
    inside = {id(module) for outer in modules for module in outer.modules() if module is not outer}
    if any(id(module) in inside for module in modules):
        return
    order = [module for module in root.modules() if any(module is unit for unit in modules)]
    # A decoder may be registered before its encoder.
    encoder = root.get_encoder() if getattr(getattr(root, "config", None), "is_encoder_decoder", False) else None
    of_encoder = {id(module) for module in encoder.modules()} if encoder is not None else set()
    chain: list[Any] = [root, *sorted(order, key=lambda unit: id(unit) not in of_encoder)]
    embedding: Any = getattr(root, "get_input_embeddings", lambda: None)()
    for here, following in itertools.pairwise(chain):
        here.set_modules_to_forward_prefetch([following])
        # A frozen embedding has no backward, in which it would be freed again; the root is there, and without a list FSDP2 takes
        # what came before.
        is_skipped = here is embedding and not any(p.requires_grad for p in here.parameters())
        following.set_modules_to_backward_prefetch([root if is_skipped else here])
    root.set_modules_to_backward_prefetch(chain[1:][-1:])
