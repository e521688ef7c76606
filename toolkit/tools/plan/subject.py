"""The model and batch to plan for, built by the run's own code without weights or data, and the trace of a rank's micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.config.validate import check_config
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.data.collate import Batch
from toolkit.models.config import load_model_config
from toolkit.models.experts import check_experts
from toolkit.models.freeze import cast_frozen, cast_trained, freeze, freeze_unreached
from toolkit.models.load import build_skeleton
from toolkit.models.lora import add_adapter, check_adapter_config, is_enabled
from toolkit.models.patches.documents import choose_packed_attention
from toolkit.models.patches.masks import choose_packing
from toolkit.models.position_limits import check_positions
from toolkit.objectives import objective_of
from toolkit.objectives.objective import Objective
from toolkit.optimizers import check_sharding, state_bytes
from toolkit.parallel.units import local_tensor, repeated_blocks
from toolkit.parallel.wrap import ShardedModel, shard_model
from toolkit.tools.plan.strategy import Strategy, check_planned_dtype, planned_accelerator, planned_frozen_dtype
from toolkit.tools.plan.trace import GRADIENTS, SHARDED_PARAMETERS, UNSHARDED_GRADIENTS, Trace, fake_copy, trace_micro_batch
from toolkit.tools.private import FAKE_POINTER_READ, private, replaced
from toolkit.tools.recipes import find_recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

OPTIMIZER = "optimizer state"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and config to plan for."""

    config: RecipeConfig
    objective: Objective
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
    objective = objective_of(config)
    model_config = load_model_config(skeleton_config, objective)
    check_positions(model_config, model, row_tokens(config, objective), dataclasses.replace(config.eval, generate=False))
    # The model, adapted and frozen.
    skeleton = build_skeleton(skeleton_config, model_config, objective)
    check_experts(skeleton, model)
    config = freeze_unreached(skeleton, config)
    if is_enabled(config.adapter):
        add_adapter(skeleton, config.adapter, config.model)
    else:
        freeze(skeleton, config.model.freeze)
    why_dense, config = "", choose_packing(config, skeleton, is_one_graph=strategy.is_one_graph)
    if config.packs and not is_flash:
        dtype, is_one_graph = strategy.compute_dtype, strategy.is_one_graph
        why_dense = choose_packed_attention(skeleton, named, device_type, dtype, is_one_graph=is_one_graph)
    stored: dict[str, Any] = {"has_adapter": is_enabled(config.adapter), "base_dtype": config.adapter.base_dtype}
    dtype = planned_frozen_dtype(strategy, config.model.frozen_dtype, **stored)
    cast_frozen(skeleton, dtype)
    check_planned_dtype(strategy, config.model.trained_dtype)
    cast_trained(skeleton, config.model.trained_dtype)
    built: Any = {"model_config": model_config, "skeleton": skeleton.train()}
    return Subject(config=config, objective=objective, **built, is_flash=is_flash, why_dense=why_dense)


def build_batch(subject: Subject, rows: int) -> Batch:
    """A micro-batch of the longest rows from the run's collator; every token is a label. Of several sources one is padded."""
    (longest, *others), build_row = row_tokens(subject.config, subject.objective).values(), subject.objective.build_row
    collator = subject.objective.build_collator(subject.skeleton, 0)
    if others:
        lengths = [longest] * (rows - 1) + [max(1, longest - (rows > 1))]
        return collator.collate([[build_row(length, others[0], collator.pad_token_id + 1)] for length in lengths])
    # Two texts per pack: except with flash attention, a T x T mask or attention by document keeps them apart.
    is_masked = subject.config.data.packing and not subject.is_flash and longest > 1
    texts = [longest // 2, longest - longest // 2] if is_masked else [longest]
    return collator.collate([[build_row(length, length - 1, 0) for length in texts]] * rows)


def num_micro_batches(subject: Subject, strategy: Strategy, rows: int) -> int:
    """Micro-batches of one step and rank; an upper bound if rows are packed."""
    train = subject.config.train
    if train.global_batch_size_tokens:
        per_row = sum(row_tokens(subject.config, subject.objective).values())
        return max(1, -(-train.global_batch_size_tokens // (per_row * rows * strategy.num_processes)))
    return max(1, -(-train.global_batch_size_rows // (rows * strategy.num_processes)))


def row_tokens(config: RecipeConfig, objective: Objective) -> dict[str, int]:
    return {side: getattr(config.data, limit) for side, limit in objective.limits.items()}


def find_stacks(model: PreTrainedModel) -> list[list[nn.Module]]:
    """The model's repeated blocks, grouped by the module list that holds them."""
    blocks = {id(block) for block in repeated_blocks(model).values()}
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [blocks_of for blocks_of in lists if blocks_of and all(id(block) in blocks for block in blocks_of)]


def trace_rank(subject: Subject, strategy: Strategy, skeleton: PreTrainedModel, rows: int) -> tuple[Trace, ShardedModel]:
    """The trace of one micro-batch of `rows`, with optimizer state, and the model it ran on; call within `fake_ranks`. A wrap
    class that is not in the model, or a weight that is tied across shard units, is a `UserError`."""
    accelerator = planned_accelerator(strategy)
    batch = build_batch(subject, rows)
    off_device = frozenset({SHARDED_PARAMETERS, GRADIENTS}) if strategy.offload else frozenset()
    vocab_size = subject.skeleton.config.get_text_config().vocab_size

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        computing.enter_context(sharded.computing())  # up to the end of the backward
        return subject.objective.loss(model, batch)[0]  # label smoothing has the same peak

    # transformers' own grouped products keep the same tensors as torch's, whose fake ones are in bf16 only. And `fully_shard`
    # need not cut the shards of the ranks that do not exist.
    grouped = replaced("_can_use_grouped_mm", lambda *_: False)
    own_shard = replaced("_chunk_with_empty", lambda tensor, num, dim: [tensor.narrow(dim, 0, -(-tensor.size(dim) // num))])
    fake = private("FakeTensorMode")(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), fake, grouped, contextlib.ExitStack() as computing:
        warnings.filterwarnings("ignore", message=FAKE_POINTER_READ)
        # The sharded model; accumulated gradients exist if a step has several micro-batches.
        with own_shard:
            options: Any = {"gpu_bytes": strategy.gpu_bytes or 0, "checkpointing": strategy.activation_checkpointing}
            sharded = shard_model(accelerator, cast("PreTrainedModel", fake_copy(skeleton)), **options)
        if num_micro_batches(subject, strategy, rows) > 1:
            for parameter in sharded.model.parameters():  # in fp32, in which they add up
                parameter.grad = torch.empty_like(parameter, dtype=torch.float32) if parameter.requires_grad else None
        fake_batch = {
            name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        stacks = find_stacks(sharded.unwrapped)
        trace = trace_micro_batch(sharded.model, stacks, fake_batch, loss, vocab_size, off_device, strategy.is_cpu)
        num_trainable = sum(local_tensor(p).numel() for p in sharded.model.parameters() if p.requires_grad)
        optimizer_bytes = local_state_bytes(subject, sharded.model)
    # What the trace does not see.
    if strategy.kind == "fsdp1":  # one flat gradient per unit, frozen parameters included: its shard in fp32
        frozen = [unit.num_parameters - unit.num_trainable for unit in sharded.units if unit.num_trainable]
        for peak in trace.peaks[trace.first_backward_phase :]:
            peak[UNSHARDED_GRADIENTS] += max(frozen, default=0) * strategy.compute_dtype.itemsize
            peak[GRADIENTS] += 0 if strategy.offload else sum(frozen) * 4 // strategy.num_shards
    for peak in trace.peaks:
        peak[OPTIMIZER] = 0 if strategy.offload else optimizer_bytes
        if strategy.kind == "ddp" and strategy.num_processes > 1:
            peak[GRADIENTS] = num_trainable * 4  # views of DDP's buckets, which it allocates at the start
    return trace, sharded


def local_state_bytes(subject: Subject, model: nn.Module) -> int:
    """Bytes of the optimizer state on a rank, for its shards of the trainable parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(state_bytes(subject.config.optim.name, tuple(p.shape), tuple(local_tensor(p).shape)) for p in trained)
