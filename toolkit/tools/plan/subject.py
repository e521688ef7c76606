"""The model and batch to plan for, built by the run's own code without weights or data."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.config.validate import check_config
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.data.collate import Batch
from toolkit.models.config import load_model_config
from toolkit.models.experts import check_experts
from toolkit.models.freeze import cast_frozen, freeze
from toolkit.models.load import build_skeleton
from toolkit.models.lora import add_adapter, check_adapter_config, is_enabled
from toolkit.models.patches.documents import choose_packed_attention
from toolkit.models.patches.masks import choose_packing
from toolkit.models.position_limits import check_positions
from toolkit.optimizers import check_sharding
from toolkit.parallel.units import repeated_blocks
from toolkit.tools.plan.strategy import Strategy, planned_frozen_dtype
from toolkit.tools.recipes import find_recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and config to plan for."""

    config: RecipeConfig
    model_config: PretrainedConfig
    skeleton: PreTrainedModel
    """The model on the meta device, adapted, frozen and in the dtypes of a run."""
    is_flash: bool
    why_dense: str
    """Why packed rows get a dense mask; empty if they get none."""


def build_subject(model: str, strategy: Strategy, run_arguments: list[str], recipe: str | None) -> Subject:
    """The run's config, and its model before sharding, on the meta device. Raises whatever the run itself would."""
    # The config; defaults take its place if the user gives none.
    if not any(argument.partition("=")[0] == "--config" for argument in run_arguments):
        defaults = ["--train.num_epochs=1", "--train.micro_batch_size_rows=1"]
        run_arguments = [*defaults, f"--train.global_batch_size_rows={strategy.num_processes}", *run_arguments]
    config_class = CONFIGS[find_recipe(run_arguments, recipe, model)]
    check = partial(check_config, needs_source=False)
    config: RecipeConfig = load_config(config_class, [*run_arguments, f"--model.name_or_path={model}"], check=check)
    check_global_batch_size(config.train, strategy.num_processes)
    check_adapter_config(config)
    check_sharding(config.optim.name, is_flat=strategy.kind == "fsdp1")
    # The model's config; `from_scratch`, because nothing of the weights is needed, not even their index. Flash and flex
    # attention may lack their package or device here. sdpa's kernels keep the same tensors; flex attention keeps a mask of
    # blocks instead of a bias.
    named, device_type = config.model.attn_implementation, "cpu" if strategy.is_cpu else "cuda"
    is_flash = any(name in (named or "") for name in ("flash", "flex"))
    attention = "sdpa" if is_flash else named
    skeleton_config = dataclasses.replace(config.model, from_scratch=True, attn_implementation=attention)
    model_config = load_model_config(skeleton_config, config.task)
    check_positions(model_config, model, row_tokens(config), dataclasses.replace(config.eval, generate=False))
    # The model, adapted and frozen.
    skeleton = build_skeleton(skeleton_config, model_config, config.task)
    check_experts(skeleton, model)
    if is_enabled(config.adapter):
        add_adapter(skeleton, config.adapter, config.model)
    else:
        freeze(skeleton, config.model.freeze)
    why_dense, config = "", choose_packing(config, skeleton)
    if config.packs and not is_flash:
        dtype, is_one_graph = strategy.compute_dtype, strategy.is_one_graph
        why_dense = choose_packed_attention(skeleton, named, device_type, dtype, is_one_graph=is_one_graph)
    stored: dict[str, Any] = {"has_adapter": is_enabled(config.adapter), "base_dtype": config.adapter.base_dtype}
    dtype = planned_frozen_dtype(strategy, config.model.frozen_dtype, **stored)
    cast_frozen(skeleton, dtype)
    return Subject(config=config, model_config=model_config, skeleton=skeleton.train(), is_flash=is_flash, why_dense=why_dense)


def build_batch(subject: Subject, rows: int) -> Batch:
    """A micro-batch of the longest rows from the run's collator; every token is a label. Of several sources one is padded."""
    lengths = row_tokens(subject.config)
    collator = subject.config.task.build_collator(subject.skeleton, 0)
    if "source" in lengths:
        token = collator.pad_token_id + 1
        sources = [lengths["source"]] * (rows - 1) + [max(1, lengths["source"] - (rows > 1))]
        batch: Batch = collator.collate([[{"input_ids": [token] * n, "labels": [token] * lengths["target"]}] for n in sources])
        return batch
    # Two texts per pack: except with flash attention, a T x T mask or attention by document keeps them apart.
    is_masked = subject.config.data.packing and not subject.is_flash and lengths["row"] > 1
    first = lengths["row"] // 2 if is_masked else lengths["row"]
    texts = [first, lengths["row"] - first] if is_masked else [first]
    pack = [{"input_ids": [0] * length, "labels": [-100] + [0] * (length - 1)} for length in texts]
    batch = collator.collate([pack] * rows)
    return batch


def num_micro_batches(config: RecipeConfig, strategy: Strategy, rows: int) -> int:
    """Micro-batches of one step and rank; an upper bound if rows are packed."""
    train = config.train
    if train.global_batch_size_tokens:
        per_row = sum(row_tokens(config).values())
        return max(1, -(-train.global_batch_size_tokens // (per_row * rows * strategy.num_processes)))
    return max(1, -(-train.global_batch_size_rows // (rows * strategy.num_processes)))


def row_tokens(config: RecipeConfig) -> dict[str, int]:
    return {side: getattr(config.data, limit) for side, limit in config.task.sides.items()}


def find_stacks(model: PreTrainedModel) -> list[list[nn.Module]]:
    """The model's repeated blocks, grouped by the module list that holds them."""
    blocks = {id(block) for block in repeated_blocks(model).values()}
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [blocks_of for blocks_of in lists if blocks_of and all(id(block) in blocks for block in blocks_of)]


def even_stack_length(model: PreTrainedModel) -> int | None:
    """Number of blocks in each stack, if all stacks have equally many, alike from the second on; else None."""
    stacks = find_stacks(model)
    sizes = [{(p.shape, p.dtype, p.requires_grad) for p in block.parameters()} for stack in stacks for block in stack[1:]]
    lengths = {len(stack) for stack in stacks}
    each = len(sizes) // max(1, len(stacks))
    is_even = len(lengths) == 1 and all(size == sizes[place // each * each] for place, size in enumerate(sizes))
    return lengths.pop() if is_even else None


def shortened(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """A copy with only the first `length` blocks of each stack."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    chosen = [s for s in stacks if any(list(s) == stack for stack in find_stacks(model))]
    memo: dict[int, Any] = {id(stack): nn.ModuleList(copy.deepcopy(block) for block in stack[:length]) for stack in chosen}
    return copy.deepcopy(model, memo)
