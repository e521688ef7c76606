"""Shard units: which modules FSDP gathers together, found by inspecting the model, not by its name.

A *shard unit* is what FSDP gathers at once: a block (a repeated layer), an embedding, an output head, or the root with
everything else. Modules that share a tied weight must lie in one unit. Tied embeddings and heads stay in the root, so T5's four
tied modules do, whatever their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard

from toolkit.errors import UserError
from toolkit.models.freeze import aliases
from toolkit.models.patches.chunked_loss import called_once, find_head, text_part
from toolkit.models.quantized import num_weights
from toolkit.parallel.float8 import plain
from toolkit.private import private

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin

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
    """Of the plain model where a layer is quantized."""
    num_trainable: int
    dtypes: tuple[str, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Its own, as they are now."""
        return [p for name, p in self.module.named_parameters() if clean_name(name) in self.parameter_names]

    def gathered_bytes(self, itemsize: int) -> int:
        """Bytes of this unit's parameters once gathered in a compute dtype of this size; codes and scales stay as they are."""
        return sum(p.numel() * (itemsize if p.is_floating_point() else p.itemsize) for p in self.parameters())

    def local_bytes(self) -> int:
        """Bytes of this unit's parameters on this rank; after sharding, about 1/world of the unit."""
        return sum(local_tensor(p).numel() * p.element_size() for p in self.parameters())

    def cut(self) -> str:
        """A remark if experts are not cut along the first dimension; else empty."""
        cuts = [cut for p in self.parameters() if isinstance(p, DTensor) for cut in p.placements]
        return ", each expert cut by rows" if any(isinstance(cut, Shard) and cut.dim > 0 for cut in cuts) else ""


def find_blocks(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> dict[str, nn.Module]:
    """Modules that become shard units of their own, by name, outermost ones only: blocks, and towers that texts do not call. A
    wrap class of the YAML that is not in the model, is all of it, or is called or read from outside a block is a `UserError`,
    and so is a model without a repeated block to infer."""
    # By size, or not at all.
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        return _large_modules(model, plugin.min_num_params or 0)
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return {}
    # By class: those that the YAML names, else the repeated blocks.
    existing = _class_names(model)
    named = [name for name in plugin.transformer_cls_names_to_wrap or [] if name not in ("", "None")]
    blocks = _outermost(model, lambda module: type(module).__name__ in named) if named else _untied(model, repeated_blocks(model))
    if (missing := [name for name in named if name not in existing]) or not blocks:
        what = f"no repeated block found in {type(model).__name__}: name one in fsdp_transformer_layer_cls_to_wrap"
        if missing:
            what = f"fsdp_transformer_layer_cls_to_wrap names {missing[0]}, which is not in {type(model).__name__}"
        raise UserError(f"{what}; classes that exist: {', '.join(existing)}")
    # Ranks must gather units alike, or they hang: the loss calls what follows the backbone once per chunk of a rank's rows.
    inside, read_outside = {id(module) for outer in called_once(model) for module in outer.modules()}, _read_outside(model)
    for name, block in blocks.items():
        if name and id(block) in inside and id(block) not in read_outside:
            continue
        why = "which an adapter of experts reads from outside" if name else "which is the full model"
        if name and id(block) not in read_outside:
            why = f"and {name} would be gathered once for each chunk of a rank's loss, of which ranks have different numbers"
        what = f"fsdp_transformer_layer_cls_to_wrap names {type(block).__name__}"
        raise UserError(f"{what}, {why}: name the class of the repeated layers only")
    towers = find_towers(model)
    return _beside(blocks, towers) | towers


def _untied(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks without the classes whose blocks share weights with others (Zamba's hybrid layers): blocks inside those count
    instead, and what is shared stays with the root."""
    sharing = {owner for names in aliases(model).values() if len(owners := _owners(names, blocks)) > 1 for owner in owners}
    if not (tied := {type(blocks[name]).__name__ for name in sharing if name}):
        return blocks
    classes = {type(block).__name__ for block in blocks.values()} - tied
    return _outermost(model, lambda module: type(module).__name__ in classes) or blocks


def find_towers(model: Any) -> dict[str, nn.Module]:
    """The modules of the backbone beside the part that texts pass, as for images, by name. Texts do not call them: units of their
    own are never gathered. Empty for a model of texts alone."""
    if not hasattr(model, "config"):
        return {}
    part = text_part(model)
    if model.config.is_encoder_decoder:  # T5Gemma 2's are in its encoder, beside what holds the embedding
        config = getattr(model.get_encoder(), "config", model.config)
        if config.get_text_config() is not config:
            embedding = model.get_encoder().get_input_embeddings()
            part = next(name for name, module in model.named_modules() if any(child is embedding for child in module.children()))
    if not part:
        return {}
    parent, _, own = part.rpartition(".")
    inside = {id(module) for outer in called_once(model) for module in outer.modules()} - {id(model.get_output_embeddings())}
    return {
        f"{parent}.{name}".lstrip("."): module
        for name, module in model.get_submodule(parent).named_children()
        if name != own and id(module) in inside and any(True for _ in module.parameters())
    }


def find_ends(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Input embedding and output head, by name, where each shares no weight with another module and lies in no block.

    They are units beside the blocks: the root stays gathered for a full step, with 2 GiB of an 8B's embedding and head.
    """
    names_of, inside = aliases(model), {id(module) for outer in called_once(model) for module in outer.modules()}
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    ends = {name: module for name, module in model.named_modules() if module is embedding and id(module) in inside}
    return {
        name: module
        for name, module in (ends | find_head(model)).items()
        if blocks
        and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
        and all(alias.startswith(f"{name}.") for parameter in module.parameters() for alias in names_of[id(parameter)])
    }


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated layers by name: modules of its `_no_split_modules`, else the elements of its module lists.

    Left out is a layer that shares a weight with a module outside (BERT lists its embeddings, and its head ties them), or is in a
    tower that texts do not call.
    """
    listed = private("_no_split_modules", model) if hasattr(model, "config") else ()  # a convnet is not from transformers
    classes = set(listed or ()) & set(_class_names(model))
    if not classes:  # those of the elements of its outermost module lists
        lists = _outermost(model, lambda module: isinstance(module, nn.ModuleList))
        layers = [layer for listed in lists.values() for layer in listed]
        classes = {type(layer).__name__ for layer in layers if any(True for _ in layer.parameters())}
    blocks = _outermost(model, lambda module: type(module).__name__ in classes)
    owned = [_owners(names, blocks) for names in aliases(model).values()]
    shared = {owner for owners in owned if "" in owners for owner in owners}
    return _beside({name: block for name, block in blocks.items() if name not in shared}, find_towers(model))


def _outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """The wanted modules by name, without those inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_wanted(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _beside(blocks: dict[str, nn.Module], towers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks that lie in no tower."""
    return {name: block for name, block in blocks.items() if _owners([name], towers) == {""}}


def _owners(names: list[str], prefixes: Iterable[str]) -> set[str]:
    """The innermost modules, of those at `prefixes`, in which a parameter's names lie; "" for a name in none."""
    return {max((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), key=len, default="") for name in names}


def _class_names(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules()})


def _large_modules(model: nn.Module, min_num_parameters: int) -> dict[str, nn.Module]:
    """Size-based wrap, bottom up: modules with at least `min_num_parameters` that no child's unit holds already.

    Three kinds of modules are left out. Modules that are never called, such as module lists: FSDP gathers when a module is
    called. Modules that hold a tied weight with another name outside: it moves up to the first module that holds all of its
    names. And the output head, which `find_ends` may take, whatever its size.
    """
    blocks: dict[str, nn.Module] = {}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names_of, read_outside = aliases(model), _read_outside(model)

    def visit(path: str, module: nn.Module) -> dict[int, int]:
        """Sizes of the parameters under `module` that no unit holds, by id, so that tied ones count once."""
        left = {id(p): num_weights(name, p) for name, p in module.named_parameters(recurse=False)}
        for child_name, child in module.named_children():
            left |= visit(f"{path}.{child_name}".lstrip("."), child)
        is_called_once = type(module).forward is not nn.Module.forward and module is not head and id(module) not in read_outside
        holds_all = all(name.startswith(f"{path}.") for parameter in left for name in names_of[parameter])
        if path and is_called_once and holds_all and sum(left.values()) >= max(1, min_num_parameters):
            blocks[path] = module
            return {}
        return left

    visit("", model)
    return blocks


def _read_outside(model: nn.Module) -> set[int]:
    """Modules inside an adapter of experts, which reads their parameters and does not call them."""
    wrappers = [module for module in model.modules() if hasattr(module, "parameter_name")]
    return {id(part) for wrapper in wrappers for part in wrapper.modules() if part is not wrapper}


def build_units(model: nn.Module, blocks: dict[str, nn.Module]) -> list[ShardUnit]:
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
                num_parameters=sum(num_weights(n, p) for n, p in own.items()),
                num_trainable=sum(p.numel() for p in own.values() if p.requires_grad),
                dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in own.values()})),
            )
        )
    return units


def check_ties(model: nn.Module, units: list[ShardUnit]) -> None:
    """Check that no weight is tied across two units: one would gather it, and the other would lack it. A `UserError` names
    it."""
    for names in aliases(model).values():
        if len(_owners(names, [unit.name for unit in units])) > 1:
            raise UserError(f"{' and '.join(names)} are one tied weight, but lie in different shard units: wrap them together")


def describe(units: list[ShardUnit]) -> str:
    """The shard units in a line, with what of them is on this rank."""
    kinds = Counter(unit.class_name for unit in units)
    named = ", ".join(f"{number} {name}" for name, number in kinds.items())
    dtypes = " and ".join(sorted({dtype for unit in units for dtype in unit.dtypes}))
    num_parameters, mib = sum(unit.num_parameters for unit in units), sum(unit.local_bytes() for unit in units) / 2**20
    cut = max(unit.cut() for unit in units)
    return f"{named}: {num_parameters:,} parameters in {dtypes}, {mib:,.1f} MiB of them on rank 0{cut}"


def describe_units(units: Sequence[ShardUnit], **more: Callable[[ShardUnit], int]) -> list[dict[str, Any]]:
    """The kinds of units; equal ones share an entry. `more` gives further figures of a unit."""
    kinds: dict[tuple, list[ShardUnit]] = {}
    for unit in units:
        kinds.setdefault((unit.class_name, unit.num_parameters, unit.num_trainable, unit.dtypes), []).append(unit)
    return [
        {
            "unit": (class_name if len(equal) > 1 else f"{class_name} {equal[0].name or '(the rest)'}") + equal[0].cut(),
            "count": len(equal),
            "num_parameters": num,
            "num_trainable": num_trainable,
            "dtypes": list(dtypes),
            "bytes_on_rank_0": sum(unit.local_bytes() for unit in equal),
            **{name: figure(equal[0]) for name, figure in more.items()},
        }
        for (class_name, num, num_trainable, dtypes), equal in kinds.items()
    ]


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, unwrapped."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
