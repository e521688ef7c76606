"""How a run resumes; its first lines, before its training: model, data, preset, steps, and where things go; and how it ends."""

from __future__ import annotations

import importlib
import logging
import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from toolkit.checkpoint.find import best_value
from toolkit.checkpoint.load import best_of_run, describe_versions, forget_unequal, load_checkpoint, load_weights
from toolkit.checkpoint.manifest import Checkpoint
from toolkit.checkpoint.save import CheckpointWriter
from toolkit.config.schema import CheckpointConfig, EvalConfig
from toolkit.distributed.comm import close_groups, on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.device import all_cores
from toolkit.distributed.progress import Progress
from toolkit.distributed.watchdog import enter_phase, stop
from toolkit.errors import UserError, first_of, plural
from toolkit.export.card import Origin
from toolkit.export.model_files import dtype_name
from toolkit.export.paths import export_paths_of_run, push
from toolkit.export.run_data import describe_data, save_run_data
from toolkit.export.usage import list_commands
from toolkit.export.write import export_model
from toolkit.files.lock import release_locks
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.accelerator import compute_dtype, forget_accelerator, fsdp_mesh, fsdp_version
from toolkit.launch.environment import checkpoints_activations
from toolkit.launch.run_folder import restore_run_folder, save_run_config
from toolkit.models.experts import expert_counts
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import BLOCK_SIZE
from toolkit.parallel.units import describe
from toolkit.tracking.baselines import measure_baselines
from toolkit.tracking.flops import seconds_at_peak
from toolkit.tracking.metrics_log import MetricsLog
from toolkit.tracking.step_log import StepLog
from toolkit.tracking.trackers import Trackers, close_trackers
from toolkit.training.best_metric import build_best_metric
from toolkit.training.data import num_steps
from toolkit.training.optim import describe_rate_change
from toolkit.training.setup import Run

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("toolkit")


def start_run(run: Run) -> None:
    """Resume the run from its last checkpoint, if any, and note its config in its folder. Collective. A checkpoint of another
    run, or a folder that cannot be written, is a `UserError` on every rank."""
    config, folder, rows = run.config, run.folder, run.rows
    run.num_steps, run.best_metric = num_steps(config, run.plan), build_best_metric(config.eval, run.evaluation)
    run.metrics, run.data = open_metrics(config, folder), describe_data(rows, run.evaluation)
    resume(run, run.resume_from)
    save_run_config(config, folder)
    on_rank_0(lambda: save_run_data(folder, run.data, rows.tokenizer))
    enter_phase("recording what the report shows", counts_cpu=True)
    about_rows = partial(_tool("preview.summary").describe_rows, config, rows, run.evaluation)
    _tool("report.facts").save_record(folder, run.sharded.units, about_rows)


def open_metrics(config: Any, run_folder: Path) -> MetricsLog:
    """Open `metrics.jsonl`, which rank 0 writes; one that cannot be read or written, or is broken, is a `UserError` on every
    rank. Collective."""
    restore = partial(restore_run_folder, config, run_folder)
    return on_all_ranks(lambda: MetricsLog(run_folder / "metrics.jsonl", rank() == 0, restore))


def resume(run: Run, checkpoint: Checkpoint | None) -> None:
    """Load the checkpoint, if any, and drop what the run logged after it; one of another run is a `UserError` on every rank.
    Collective."""
    # Weights, moments, random state.
    enter_phase("loading the checkpoint", counts_cpu=True)
    if checkpoint is None:
        return run.metrics.truncate_after(-1)
    run.state = state = load_checkpoint(checkpoint, run.sharded, run.optimizer, run.identity)
    manifest, theirs = checkpoint.manifest, checkpoint.settings
    # What is different now: the best metric's meaning, the learning rate.
    num_steps_before = theirs["train.max_steps"] or run.plan.num_steps(theirs["train.num_epochs"])
    remarks = [
        describe_versions(manifest),
        forget_unequal(state, manifest, run.best_metric),
        describe_rate_change(run.config.optim, state.step + 1, num_steps_before, run.num_steps, run.plan),
    ]
    logger.info(f"resuming from {checkpoint.folder}, after step {state.step}")
    for remark in filter(None, remarks):
        logger.info(remark)
    # A complete run is evaluated again where its figures lack the metric that is asked for now.
    state.evaluation_due |= (
        bool(manifest["metrics"]) and run.best_metric.name not in state.metrics and state.step >= run.num_steps
    )
    # metrics.jsonl up to the checkpoint.
    enter_phase("resuming", counts_cpu=True)
    run.metrics.truncate_after(state.step, evaluation_due=state.evaluation_due)
    if run.metrics.is_empty:  # lines are written before their checkpoint
        known = " but the checkpoint's own evaluation" if manifest["metrics"] else ""
        why = "it was removed or emptied, or the checkpoint is another run's"
        logger.warning(f"{run.metrics.path} has no figures of earlier steps{known}: {why}")
        if manifest["metrics"]:
            run.metrics.write("eval", state.step, **manifest["metrics"], measured_on=manifest["measured_on"])
    if state.step < run.num_steps:
        run.metrics.write("resume", state.step, num_processes=world_size())


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
            logger.info(f"{label:<12}{text}")


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
    names = [Path(item.label).name for item in texts.inputs if not item.is_eval_file] if (texts := run.rows.texts) else []
    source = f"{first_of(names, 1)}: " if names else ""
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


def build_log(run: Run) -> StepLog:
    """The log of the steps that follow `run.state`. Collective."""
    bar = Progress(run.num_steps, run.state.step, run.config.log_every_steps)
    log = StepLog(run.metrics, run.sharded, bar, run.rows.train, run.state.skips, run.config.optim.max_skipped_steps)
    log.trackers, log.metrics_of = run.trackers, run.objective.metrics
    log.num_input_tokens_seen = sum(run.plan.step(number).num_tokens for number in range(1, run.state.step + 1))
    if rank() == 0:
        texts = run.objective.computed_lengths(run.rows.train)
        log.seconds_at_peak = seconds_at_peak(run.objective, run.sharded, run.evaluation.collator, texts)
    return log


def build_writer(run: Run) -> CheckpointWriter:
    """The writer of the checkpoints that follow `run.state`. Collective."""
    best_saved = on_rank_0(lambda: best_value(run.folder, run.best_metric, run.state.step))
    return CheckpointWriter(
        run.folder, run.sharded, run.optimizer, run.identity, run.config.checkpoint, run.best_metric, best_saved
    )


def finish(run: Run) -> Path | None:
    """Export the model, compare it with the trained one, and print the results; returns the exported folder. Collective.

    A run of no steps exports only if `export.merge` asks for it. What cannot be written is a `UserError` on every rank.
    """
    # The weights to export, and what the model card says of them.
    config, step = run.config, run.state.step
    exports = run.num_steps > 0 or config.export.merge
    if run.num_steps > 0 and config.export.weights == "best":
        best, choice = best_of_run(run.folder, run.best_metric)
        logger.info(choice)
        if best is not None:
            load_weights(best.folder, run.sharded)
            step = best.step
    enter_phase("showing the results", counts_cpu=True)
    measured = run.metrics, run.state.step, run.rows.train, run.evaluation, run.best_metric.measured_on
    counts_tokens = config.model.from_scratch and run.objective.counts_tokens
    on_all_ranks(lambda: measure_baselines(*measured, counts_tokens))
    # The folders, and what to do with them.
    if exports:
        places = export_paths_of_run(config, run.folder)
        computed_in = dtype_name(compute_dtype(run.sharded.accelerator))
        lines = run.metrics.load() if rank() == 0 else []
        origin = Origin(step, computed_in, world_size(), run.data, lines, frozen_hashes=run.identity.frozen_hashes)
        with all_cores(run.sharded.accelerator.device):
            export_model(config, run.sharded, run.evaluation, origin, places)
    merged = f", merged into its base to {run.folder / 'merged'}" if config.export.merge else ""
    logger.info(f"exported to {run.folder / 'export'}{merged}" if exports else "nothing is exported: train.max_steps is 0")
    if exports:
        for line in list_commands(run.objective, config, run.sharded.skeleton, run.evaluation.tokenizer, origin, places):
            logger.info(line)
        if not config.has_own_objective:
            logger.info(f"export another checkpoint: python -m toolkit export {shlex.quote(str(run.folder))} --checkpoint STEP")
    enter_phase("showing the results", counts_cpu=True)
    on_all_ranks(lambda: _tool("report.terminal").show_results(run.metrics, run.evaluation))
    on_rank_0(lambda: _tool("report.page").draw_curves(run.metrics.load(), run.folder / "curves.png"))
    run.metrics.note_lost_outputs(run.state.step)
    _tool("report.page").save_run_page(run.folder)
    is_main = rank() == 0
    leave(run.trackers)
    if exports and config.export.push_to_hub and is_main:  # no rank waits for the upload
        try:
            push(places.model or run.folder / "export", config.export.push_to_hub, private=True, may_be_public=True)
        except UserError as error:
            logger.warning(str(error))
    return run.folder / "export" if exports else None


def _tool(name: str) -> Any:
    """A module of `toolkit/tools/`, which fills in and draws a run's pages. Found by name: the core imports no tool."""
    return importlib.import_module(f"toolkit.tools.{name}")


def leave(trackers: Trackers | None = None) -> None:
    """Close the trackers, the watchdog and the process groups at the end of a run. Collective."""
    close_trackers(trackers or Trackers())
    release()


def release() -> None:
    """Give back what a run holds in its process, so that another can begin there. Collective."""
    stop()
    close_groups()
    forget_accelerator()
    release_locks()
