"""The phases that all recipes share: checks before data and weights load, loading, resuming, and the end of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.init_from import find_weights, load_into
from toolkit.checkpoint.load import best_of_run, choose_checkpoint, forget_unequal, load_checkpoint, load_manifest, load_weights
from toolkit.checkpoint.state import Identity, TrainState
from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.config.paths import write_paths
from toolkit.config.validate import check_evaluation_rows, check_num_steps
from toolkit.data.batch_plan import BatchPlan, check_global_batch_size
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.distributed.comm import close_groups, on_all_ranks, rank, world_size
from toolkit.distributed.watchdog import keep_stacks_in, start, stop, working
from toolkit.evaluation.metrics import TextMetric, load_text_metrics, metric_name
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export.write import check_export_places, export_model
from toolkit.launch.accelerator import bound_primitive_cache, build_accelerator, frozen_dtype, fsdp_version
from toolkit.launch.log import start_logging
from toolkit.launch.run_folder import lock_run_folder, open_run_folder, restore_run_folder
from toolkit.models import load, load_sharded
from toolkit.models.config import AutoClass, hash_model_config, load_model_config
from toolkit.models.freeze import cast_frozen, freeze, freeze_as, hash_frozen
from toolkit.models.load_sharded import complete_sources, open_weights
from toolkit.models.lora import add_adapter, check_adapter_config, is_enabled
from toolkit.models.safetensors_index import WholeOnly
from toolkit.models.shard_reader import Sources
from toolkit.parallel.wrap import check_wrap
from toolkit.tracking.memory import note_before_model
from toolkit.tracking.metrics_log import MetricsLog
from toolkit.tracking.summary import show_results
from toolkit.tracking.trackers import check_trackers, close_trackers
from toolkit.training import loop
from toolkit.training.after_step import Run
from toolkit.training.goal import build_goal, check_metric, check_metric_on_rows
from toolkit.training.optim import describe_rate_change

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel


logger = logging.getLogger("toolkit")

NUM_STEPS_LOOKED_AT = 100
"""Number of first steps whose distinct batch shapes are counted, to see how often shapes repeat."""


@dataclass(frozen=True)
class RunContext:
    """What is known before data and model load."""

    accelerator: Accelerator
    frozen_dtype: torch.dtype
    """Storage dtype of frozen parameters."""
    run_folder: Path
    settings: dict[str, Any]
    """As in `Identity.config`."""
    resume_from: Path | None
    """This run's checkpoint to resume from."""
    init_from: Path | None
    """Another run's weights to start from; None if they are not needed."""
    metrics: tuple[TextMetric, ...]
    """`eval.metrics`, loaded."""


def begin(config: RecipeConfig) -> RunContext:
    """Check what needs no data, open the run folder and choose the checkpoint to resume from. Collective.

    Raises:
        UserError: something is wrong with the two YAML files, the run folder or its checkpoints; on every rank.
    """
    start_logging()  # for programs that begin a run by themselves; a recipe has done it
    # Checks of the config alone, then the accelerator.
    check_trackers(config.tracking)
    check_metric(config.eval, own=[metric_name(name) for name in config.eval.metrics])
    check_adapter_config(config)
    accelerator = build_accelerator(config.tracking.log_with, config.run.output_dir, config.run.timeout_s)
    start(config.run.timeout_s)
    working("opening the run")
    has_adapter = is_enabled(config.adapter)
    dtype = on_all_ranks(lambda: frozen_dtype(accelerator, config.model.frozen_dtype, has_adapter=has_adapter))
    check_global_batch_size(config.train, world_size())
    metrics = load_text_metrics(config.eval.metrics)
    # The run folder, locked against a second run.
    run_folder = open_run_folder(config)
    keep_stacks_in(run_folder)
    on_all_ranks(lambda: lock_run_folder(run_folder) if rank() == 0 else None)
    resolved = {"model.frozen_dtype": str(dtype).removeprefix("torch."), "mixed_precision": accelerator.mixed_precision}
    on_all_ranks(lambda: check_export_places(config, run_folder) if rank() == 0 else None)
    # Paths are relative to the run folder: a resume works from any directory, and after the project was moved.
    settings = {**dotted_keys(write_paths(config, run_folder)), **resolved}
    working("choosing the checkpoint")
    resume_from = choose_checkpoint(run_folder, config.checkpoint.resume, settings)
    # A checkpoint lacks frozen weights: with `model.freeze`, they come from `init_from` on a resume too.
    needs_start = resume_from is None or bool(config.model.freeze)
    init_from = find_weights(config.model.init_from) if config.model.init_from and needs_start else None
    return RunContext(accelerator, dtype, run_folder, settings, resume_from, init_from, metrics)


def build_skeleton(
    config: RecipeConfig, accelerator: Accelerator, auto_class: AutoClass
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Build the model on the meta device, to check its config, wrap classes, freezing and adapter early. Collective.

    Raises:
        UserError: one of them is wrong; on every rank.
    """
    working("building the model")
    model_config = on_all_ranks(lambda: load_model_config(config.model, auto_class))
    skeleton = on_all_ranks(lambda: load.build_skeleton(config.model, model_config, auto_class))
    on_all_ranks(lambda: _adapt(skeleton, config))
    on_all_ranks(lambda: check_wrap(accelerator, skeleton))
    return model_config, skeleton


def check_rows(config: RecipeConfig, rows: TokenizedRows, plan: BatchPlan, evaluation: EvaluationRows) -> int:
    """Check settings against the rows, print how many rows and steps there are, and return the run's number of steps.

    Raises:
        UserError: naming the setting.
    """
    # Checks.
    working("planning the batches")
    num_steps = loop.num_steps(config, plan)
    check_num_steps(config, num_steps)
    check_evaluation_rows(config, len(evaluation.rows))
    check_metric_on_rows(config.eval, evaluation)
    bound_primitive_cache(plan.num_shapes(min(num_steps, NUM_STEPS_LOOKED_AT), rank()))
    # Print the counts, per source if there are several.
    counted = [f"{(evaluation.sources == place).sum():,} of {name}" for place, name in enumerate(evaluation.source_names)]
    of_sources = f" ({', '.join(counted)})" if counted and len(evaluation.rows) else ""
    for remark in rows.remarks:
        level = logging.WARNING if remark.startswith("WARNING: ") else logging.INFO
        logger.log(level, remark.removeprefix("WARNING: "))
    logger.info(
        f"{len(rows.train):,} training rows, {len(evaluation.rows):,} held-out rows{of_sources}; {plan.steps_per_epoch:,} steps "
        f"an epoch, {num_steps:,} in all; {len(plan.micro_batches(plan.step(1), 0))} micro-batches a step on each of "
        f"{world_size()} processes"
    )
    if config.eval.generate and evaluation.prompted:
        logger.info(f"ROUGE counts {evaluation.rouge_tokenizer.description}")
    return num_steps


def longest(rows: TokenizedRows, evaluation: EvaluationRows, column: str, minus: str | None = None) -> int:
    """The largest value of `column`, minus `minus` if given, over all training and evaluation rows; 0 without rows."""
    found = 0
    for part in (rows.train, evaluation.rows):
        columns = part.with_format("numpy")
        values = columns[column][:] - (columns[minus][:] if minus else 0)
        found = max(found, int(values.max(initial=0)))
    return found


def load_model(
    config: RecipeConfig,
    context: RunContext,
    auto_class: AutoClass,
    model_config: PretrainedConfig,
    skeleton: PreTrainedModel,
) -> tuple[PreTrainedModel, Sources | None]:
    """The model, adapted and frozen like its skeleton, and the sources that `shard_model` reads its weights from. Collective.

    Under FSDP2, if each rank can read its shards from the files, the model is on the meta device. Otherwise its weights are
    on the CPU, and the sources are None.

    Raises:
        UserError: the weights do not load, or are not the model's; on every rank.
    """
    # Try to leave the weights in their files until each rank reads its shards.
    working("loading the model")
    note_before_model(context.accelerator.device)
    loaded_dtype = context.frozen_dtype if is_enabled(config.adapter) else torch.float32  # with an adapter the base is frozen
    opened = None
    if fsdp_version(context.accelerator) == 2 and not config.model.from_scratch:
        try:
            opened = open_weights(config.model, model_config, auto_class, skeleton, loaded_dtype, context.init_from)
        except WholeOnly as reason:
            logger.info(f"every rank loads all of {config.model.name_or_path} before it is sharded: {reason}")
    # Otherwise load the full model on every rank.
    if opened is not None:
        model, weights = opened
    else:
        model = on_all_ranks(lambda: load.load_model(config.model, model_config, auto_class, config.train.seed, loaded_dtype))
        if context.init_from is not None:
            load_into(model, context.init_from)
    # Adapter, freezing and dtypes.
    on_all_ranks(lambda: _adapt(model, config))
    freeze_as(model, skeleton)
    cast_frozen(model, context.frozen_dtype)
    if opened is None:
        return model, None
    return model, complete_sources(model, weights, config.adapter, config.model, config.train.seed)


def open_metrics(run_folder: Path) -> MetricsLog:
    """Open `metrics.jsonl`, which rank 0 writes. Collective.

    Raises:
        UserError: the file cannot be read or written, or is broken; on every rank.
    """
    return on_all_ranks(lambda: MetricsLog(run_folder / "metrics.jsonl", rank() == 0, restore_run_folder))


def resume(config: RecipeConfig, context: RunContext, run: Run) -> TrainState:
    """Load the checkpoint to resume from, if any, and drop what the run logged after it. Collective.

    Raises:
        UserError: the checkpoint belongs to another run; on every rank.
    """
    # Weights, moments, random state.
    working("loading the checkpoint")
    if context.resume_from is None:
        run.metrics.truncate_after(-1)
        return TrainState()
    folder = context.resume_from
    state = load_checkpoint(folder, run.sharded, run.optimizer, run.identity)
    manifest = on_all_ranks(lambda: load_manifest(folder, run.identity))
    theirs = manifest["identity"]["config"]
    # What is different now: the best metric's meaning, the learning rate.
    num_steps_before = theirs["train.max_steps"] or run.plan.num_steps(theirs["train.num_epochs"])
    remarks = [
        forget_unequal(state, manifest, build_goal(config.eval, run.evaluation)),
        describe_rate_change(config.optim, state.step + 1, num_steps_before, run.num_steps, run.plan.steps_per_epoch),
    ]
    logger.info(f"resuming from {folder}, after step {state.step}")
    for remark in filter(None, remarks):
        logger.info(remark)
    # metrics.jsonl up to the checkpoint.
    working("resuming")
    run.metrics.truncate_after(state.step, evaluation_due=state.evaluation_due)
    if run.metrics.is_empty:  # lines are written before their checkpoint
        known = " but the checkpoint's own evaluation" if manifest["metrics"] else ""
        why = "it was removed or emptied, or the checkpoint is another run's"
        logger.warning(f"{run.metrics.path} has no figures of earlier steps{known}: {why}")
        if manifest["metrics"]:
            run.metrics.write("eval", state.step, **manifest["metrics"], measured_on=manifest["measured_on"])
    return state


def finish(config: RecipeConfig, run: Run) -> None:
    """Export the model, reload and compare it, and print the results. Collective.

    A run of no steps exports only if `export.merge` asks for it.

    Raises:
        UserError: the export or the plot of the curves cannot be written; on every rank.
    """
    goal = build_goal(config.eval, run.evaluation)
    exports = run.num_steps > 0 or config.export.merge
    if run.num_steps > 0 and config.export.weights == "best":
        best, choice = best_of_run(run.folder, goal)
        logger.info(choice)
        if best is not None:
            load_weights(best, run.sharded)
    if exports:
        export_model(config, run.sharded, run.evaluation, run.folder)
    merged = f", merged into its base to {run.folder / 'merged'}" if config.export.merge else ""
    logger.info(f"exported to {run.folder / 'export'}{merged}" if exports else "nothing is exported: train.max_steps is 0")
    working("showing the results")
    on_all_ranks(lambda: show_results(run.metrics, run.train_rows, run.evaluation, goal.measured_on))
    leave(run.sharded.accelerator)


def leave(accelerator: Accelerator) -> None:
    """Close the trackers, the watchdog and the process groups at the end of a run. Collective."""
    close_trackers(accelerator)
    stop()
    close_groups()


def identity_of(
    context: RunContext, model_config: PretrainedConfig, rows: TokenizedRows, model: PreTrainedModel, sources: Sources | None
) -> Identity:
    """What a resume must find unchanged; `model` and `sources` are those of `load_model`, before sharding. Collective."""
    working("hashing frozen weights")
    frozen_hashes = hash_frozen(model) if sources is None else load_sharded.hash_frozen(model, sources)
    return Identity(context.settings, hash_model_config(model_config.to_diff_dict()), rows.fingerprint, frozen_hashes)


def _adapt(model: PreTrainedModel, config: RecipeConfig) -> None:
    """Add the adapter, which freezes the base, or freeze what `model.freeze` names."""
    if is_enabled(config.adapter):
        add_adapter(model, config.adapter, config.model, config.train.seed)
    else:
        freeze(model, config.model.freeze)
