"""The first lines of a run, before its training: model, data, preset, steps, and where things go."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from toolkit.config.schema import CheckpointConfig, EvalConfig
from toolkit.distributed.comm import rank, world_size
from toolkit.errors import plural
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.accelerator import fsdp_mesh, fsdp_version
from toolkit.launch.environment import checkpoints_activations
from toolkit.models.experts import expert_counts
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import BLOCK_SIZE
from toolkit.parallel.units import describe
from toolkit.training.setup import Run

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("toolkit")

LABEL_WIDTH = 12


def log_run_summary(run: Run) -> None:
    """An aligned line for each thing, on rank 0, which has `run.rows.texts`."""
    if rank() != 0:
        return
    config, model = run.config, run.sharded.skeleton
    # Of an adapter on a mixture of experts; in other models `adapter.target_modules` says it.
    named = {name: getattr(module, "parameter_name", "") for name, module in model.named_modules() if hasattr(module, "lora_A")}
    ends = dict.fromkeys(f"{name.replace('.base_layer', '').rpartition('.')[2]}.{own}".rstrip(".") for name, own in named.items())
    on_what = f"on {', '.join(ends)}; " + ("not on routers" if any(named.values()) else "not on experts and routers")
    # Of a quantized base.
    dtypes = {base_name(name): f"{p.dtype}"[6:] for name, p in model.named_parameters() if p.is_floating_point()}
    kept = {re.sub(r"\.\d+\.", ".*.", name): dtype for name, dtype in dtypes.items() if name}
    plain = ", ".join(f"{name} ({dtype})" for name, dtype in kept.items())
    base = f"quantized to {config.adapter.base_dtype} in blocks of {BLOCK_SIZE} inputs, except {plain}"
    # Where things go.
    places = ["metrics.jsonl", f"checkpoints ({_when(config.checkpoint)})"] * (run.num_steps > 0) or ["metrics.jsonl"]
    places += ["export"] * (run.num_steps > 0) + ["merged"] * config.export.merge + ["report.html"]
    trackers = f"; figures also to {', '.join(config.tracking.log_with)}" if config.tracking.log_with else ""
    described = {
        "model": _describe_model(run),
        "adapter": on_what if named and expert_counts(model) else "",
        "base": base if config.adapter.base_dtype else "",
        "shards": describe(run.sharded.units),
        "data": _describe_data(run),
        "evaluation": _describe_evaluation(run),
        "preset": _describe_preset(run.sharded.accelerator),
        "steps": _describe_steps(run),
        "loss": "yours trains, which holds all logits of a micro-batch; cross-entropy evaluates" if run.hooks.loss else "",
        "folder": f"{run.folder}: {', '.join(places)}{trackers}",
    }
    for label, text in described.items():
        if text:
            logger.info(f"{label:<{LABEL_WIDTH}}{text}")


def _describe_model(run: Run) -> str:
    config, units = run.config, run.sharded.units
    num_parameters, num_trainable = (sum(getattr(unit, name) for unit in units) for name in ("num_parameters", "num_trainable"))
    share = f"{num_trainable:,} ({num_trainable / num_parameters:.2%})" if num_trainable < num_parameters else "all"
    name = type(run.sharded.skeleton).__name__ + ", from scratch" * config.model.from_scratch
    name += f", weights of {config.model.init_from}" if config.model.init_from else ""
    adapter = config.adapter
    how = f" ({adapter.method} {adapter.name_or_path or f'of rank {adapter.rank}'})" if is_enabled(adapter) else ""
    return f"{config.model.name_or_path} ({name}): {num_parameters:,} parameters, {share} trainable{how}"


def _describe_data(run: Run) -> str:
    labels = [item.label for item in texts.inputs if not item.is_eval_file] if (texts := run.rows.texts) else []
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    source = f"{Path(labels[0]).name}{more}: " if labels else ""
    packs = f", packed to {run.plan.pack_length_tokens}" if run.plan.pack_length_tokens else ""
    return f"{source}{len(run.rows.train):,} training rows of {int(run.plan.num_tokens.sum()):,} tokens{packs}"


def _describe_evaluation(run: Run) -> str:
    config, evaluation = run.config.eval, run.evaluation
    if not len(evaluation.rows):
        return "no held-out rows"
    counted = [f"{len(rows.rows):,} of {name}" for name, rows in evaluation.sets.items()]
    of_sets = f" ({', '.join(counted)})" if counted else ""
    when = "before step 1, " * config.at_start + _when(config)
    return f"{len(evaluation.rows):,} held-out rows{of_sets}, {when}; best by {config.best_metric}"


def _describe_preset(accelerator: Accelerator) -> str:
    path, version, parts = find_accelerate_yaml(), fsdp_version(accelerator), []
    if version is None:
        parts.append("DDP" if world_size() > 1 else "not sharded")
    else:
        plugin, mesh = accelerator.state.fsdp_plugin, fsdp_mesh(accelerator)
        strategy = plugin.sharding_strategy or plugin.reshard_after_forward  # the older key of FSDP1, and its name now
        parts.append(f"FSDP1 {strategy.name}" if version == 1 else "FSDP2")
        if mesh is not None and mesh.ndim > 1:
            parts.append(f"{mesh.size(0)} replicas x {mesh.size(1)} shards")
        parts += ["gathered until the backward"] * (plugin.reshard_after_forward is False)
        parts += ["activation checkpointing"] * checkpoints_activations()
        offload = plugin.cpu_offload
        parts += ["CPU offload"] * (isinstance(offload, CPUOffloadPolicy) or offload == CPUOffload(offload_params=True))
    parts.append(plural(world_size(), "process"))
    parts.append("fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision)
    return f"{path.name if path else 'no accelerate YAML'}: {', '.join(parts)}"


def _describe_steps(run: Run) -> str:
    train, plan, done = run.config.train, run.plan, run.state.step
    steps = f"{done + 1:,} to {run.num_steps:,}" if 0 < done < run.num_steps else f"{run.num_steps:,}"
    tokens, num_micro_batches = train.global_batch_size_tokens, len(plan.micro_batches(plan.step(1), 0))
    batch = f"{tokens:,} tokens" if tokens else f"{train.global_batch_size_rows:,} rows"
    on_each = f"{plural(num_micro_batches, 'micro-batch')} x {train.micro_batch_size_rows} rows"
    if train.activation_checkpointing != "none":
        on_each += f", {train.activation_checkpointing} activation checkpointing"
    return f"{steps}, {plan.steps_per_epoch:,} an epoch, each of {batch}: {plural(world_size(), 'process')} x {on_each}"


def _when(section: EvalConfig | CheckpointConfig) -> str:
    if section.every_epochs is not None:
        return f"every {section.every_epochs:g} epochs and at the end"
    return f"every {section.every_steps:,} steps and at the end" if section.every_steps else "at the end"
