"""From a model on the CPU to one that is wrapped as the accelerate YAML says, and back to whole parameters.

A *shard unit* is what FSDP gathers at once: a block of the model, or the root with everything outside the blocks
(embeddings, final norm, output head). Modules that are tied to one weight must lie in one unit; as embeddings and heads
stay in the root, T5's four tied modules do, whatever they are called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from toolkit.accelerator import compute_dtype, free_memory_bytes, fsdp_version
from toolkit.distributed import reduce_on_cpu, world_size
from toolkit.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

REPLICA_SHARE_OF_FREE_MEMORY = 0.5
"""`eval.unshard: auto` gathers the model whole where that takes at most this share of every rank's free memory."""

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are gathered together."""

    name: str
    """Path of the module; empty for the root."""
    class_name: str
    """Its class before wrapping."""
    module: nn.Module
    parameter_names: tuple[str, ...]
    num_parameters: int
    num_trainable: int
    dtypes: tuple[str, ...]

    def local_bytes(self) -> int:
        """Bytes of this unit's parameters on this rank; after sharding about 1/world of the whole."""
        own = {name: parameter for name, parameter in self.module.named_parameters() if clean(name) in self.parameter_names}
        return sum(local_tensor(p).numel() * p.element_size() for p in own.values())


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
        _blocks(accelerator, skeleton)


def shard_model(accelerator: Accelerator, model: PreTrainedModel) -> ShardedModel:
    """Wrap the model as the accelerate YAML says: FSDP2, FSDP1, DDP or not at all. Collective.

    FSDP2 is applied here and not by `accelerator.prepare`: that puts tied embeddings into a unit of their own (T5 then
    fails, as its encoder and decoder hold them too), and checkpoints activations without the dropout state.
    """
    skeleton = weightless_copy(model)
    version = fsdp_version(accelerator)
    blocks = _blocks(accelerator, model) if version else {}
    units = _units(model, blocks)
    if version:
        _check_ties(model, units)
        if accelerator.state.fsdp_plugin.activation_checkpointing:
            # transformers' own: non-reentrant, per block, and it keeps the dropout state (accelerate's FSDP2 path does not).
            model.gradient_checkpointing_enable({"use_reentrant": False})
            accelerator.state.fsdp_plugin.activation_checkpointing = False
    if version == 2:
        wrapped: nn.Module = _fully_shard(accelerator, model, list(blocks.values()))
    elif version == 1:
        _wrap_exactly(accelerator, list(blocks.values()))
        wrapped = accelerator.prepare_model(model)
    else:
        wrapped = accelerator.prepare_model(model)
    return ShardedModel(accelerator=accelerator, model=wrapped, plain=model, skeleton=skeleton, units=units)


def describe(sharded: ShardedModel) -> str:
    """The shard units as a table: parameters, dtype, trainable share, bytes on this rank. Equal blocks share a line."""
    lines = [f"{'unit':<38}{'count':>6}{'parameters':>14}  {'dtype':<10}{'trainable':>10}{'MiB a rank':>12}"]
    kinds: dict[tuple, list[ShardUnit]] = {}
    for unit in sharded.units:
        kinds.setdefault((unit.class_name, unit.num_parameters, unit.num_trainable, unit.dtypes), []).append(unit)
    for (class_name, num, num_trainable, dtypes), units in kinds.items():
        share = num_trainable / max(1, num)
        local_mib = sum(unit.local_bytes() for unit in units) / 2**20
        name = class_name if len(units) > 1 else f"{class_name} {units[0].name or '(the rest)'}"
        dtype = "+".join(dtypes)
        lines.append(f"{name:<38}{len(units):>6}{num * len(units):>14,}  {dtype:<10}{share:>10.0%}{local_mib:>12.1f}")
    total = sum(unit.num_parameters for unit in sharded.units)
    trainable = sum(unit.num_trainable for unit in sharded.units) / max(1, total)
    local = sum(unit.local_bytes() for unit in sharded.units) / 2**20
    lines.append(f"{'total':<38}{len(sharded.units):>6}{total:>14,}  {'':<10}{trainable:>10.0%}{local:>12.1f}")
    return "\n".join(lines)


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
                for name, parameter in module.named_parameters():
                    if id(parameter) not in nested:
                        yield clean(f"{prefix}.{name}").lstrip("."), parameter.detach()
        return
    for name, parameter in sharded.plain.named_parameters():
        yield clean(name), parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


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
    return replica.to(device).eval()


def _blocks(accelerator: Accelerator, model: nn.Module) -> dict[str, nn.Module]:
    """Modules that become shard units of their own, by name, outermost ones only.

    Raises:
        UserError: a wrap class of the YAML is not in the model, or there is no repeated block to infer.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        return _large_modules(model, plugin.min_num_params or 0)
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return {}
    existing = sorted({type(m).__name__ for m in model.modules()})
    named = [name for name in plugin.transformer_cls_names_to_wrap or [] if name not in ("", "None")]
    for name in named:
        if name not in existing:
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap names {name}, which is not in {type(model).__name__}; "
                f"classes that exist: {', '.join(existing)}"
            )
    wanted = set(named) or set(getattr(model, "_no_split_modules", None) or []) & set(existing) or _repeated_classes(model)
    if not wanted:
        raise UserError(
            f"no repeated block found in {type(model).__name__}: name one in fsdp_transformer_layer_cls_to_wrap; "
            f"classes that exist: {', '.join(existing)}"
        )
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in wanted and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = module
    return blocks


def _repeated_classes(model: nn.Module) -> set[str]:
    """Classes of the elements of the model's outermost module lists: its repeated layers."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return {type(layer).__name__ for layers in lists.values() for layer in layers if any(True for _ in layer.parameters())}


def _large_modules(model: nn.Module, min_num_parameters: int) -> dict[str, nn.Module]:
    """Size-based wrap, bottom up: a module with at least so many parameters that no child of it took already."""
    blocks: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(f"{name}.{child_name}".lstrip("."), child) for child_name, child in module.named_children())
        if name and left >= min_num_parameters and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            blocks[name] = module
            return 0
        return left

    visit("", model)
    return blocks


def _units(model: nn.Module, blocks: dict[str, nn.Module]) -> list[ShardUnit]:
    """Blocks and the root, each with the parameters that no inner unit holds."""
    units, taken = [], set()
    for name, module in sorted(blocks.items(), key=lambda item: -item[0].count(".")) + [("", model)]:
        own = {n: p for n, p in module.named_parameters() if id(p) not in taken}
        taken |= {id(p) for p in own.values()}
        units.append(
            ShardUnit(
                name=name,
                class_name=type(module).__name__,
                module=module,
                parameter_names=tuple(own),
                num_parameters=sum(p.numel() for p in own.values()),
                num_trainable=sum(p.numel() for p in own.values() if p.requires_grad),
                dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in own.values()})),
            )
        )
    return units


def _check_ties(model: nn.Module, units: list[ShardUnit]) -> None:
    """A weight used by two units would be gathered by one and missing in the other.

    Raises:
        UserError: naming the tied names.
    """
    unit_prefixes = [unit.name for unit in units if unit.name]
    places: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = max((p for p in unit_prefixes if name.startswith(f"{p}.")), key=len, default="")
        places.setdefault(id(parameter), {})[name] = unit
    for names in places.values():
        if len(set(names.values())) > 1:
            raise UserError(
                f"{' and '.join(names)} are one tied weight, but lie in different shard units: "
                "choose wrap classes that keep them together"
            )


def _fully_shard(accelerator: Accelerator, model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """FSDP2 with the YAML's policies: blocks first, then the root with the rest."""
    from torch.distributed.device_mesh import init_device_mesh

    plugin = accelerator.state.fsdp_plugin
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    else:
        mesh = init_device_mesh(accelerator.device.type, (world_size(),))
    policies = {"mesh": mesh, "mp_policy": plugin.mixed_precision_policy, "offload_policy": plugin.cpu_offload}
    for block in blocks:
        fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **policies)
    # torch keeps the root gathered between forward and backward: it is needed at the end of one and the start of the other.
    fully_shard(model, **policies)
    register_fsdp_forward_method(model, "generate")
    return model


def _wrap_exactly(accelerator: Accelerator, blocks: list[nn.Module]) -> None:
    """Make accelerate's FSDP1 wrap just these modules."""
    import functools

    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    chosen = {id(block) for block in blocks}
    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen)
