"""A run as its phases fill it in, and its start: checks, the accelerator, the run folder, the checkpoint to resume from."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.load import choose_checkpoint, find_weights
from toolkit.checkpoint.manifest import Checkpoint
from toolkit.checkpoint.state import TrainState
from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.config.paths import write_paths
from toolkit.config.validate import list_sets
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.distributed.comm import on_all_ranks, on_rank_0, world_size
from toolkit.distributed.watchdog import enter_phase, keep_stacks_in
from toolkit.evaluation.metrics import TextMetric, describe_code, load_text_metrics, metric_name
from toolkit.export.paths import check_export_places, prepare_push
from toolkit.launch.accelerator import build_accelerator, check_trained_dtype, connect_devices, frozen_dtype
from toolkit.launch.log import start_logging
from toolkit.launch.rank_consistency import describe_config
from toolkit.launch.run_folder import lock_run_folder, open_run_folder
from toolkit.models.lora import check_adapter_config, is_enabled
from toolkit.objectives.objective import Objective
from toolkit.tracking.trackers import Trackers, check_trackers
from toolkit.training.best_metric import check_metric
from toolkit.training.parameter_checks import ReductionWatch
from toolkit.training.user_functions import UserHooks, check_hooks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel

    from toolkit.checkpoint.find import BestMetric
    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.checkpoint.state import Identity
    from toolkit.data.batch_plan import BatchPlan
    from toolkit.data.tokens.prepare import TokenizedRows
    from toolkit.distributed.signals import StopRequests
    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.export.run_data import RunData
    from toolkit.parallel.wrap import ShardedModel
    from toolkit.tracking.metrics_log import MetricsLog
    from toolkit.tracking.step_log import StepLog
    from toolkit.training.skip_guard import SkipGuard


@dataclass
class Run:
    """The objects of a run, and where it stands. Each phase sets its own."""

    config: RecipeConfig
    objective: Objective
    accelerator: Accelerator
    frozen_dtype: torch.dtype
    """Storage dtype of frozen parameters."""
    folder: Path
    settings: dict[str, Any]
    """As in `Identity.config`."""
    resume_from: Checkpoint | None = None
    """This run's checkpoint to resume from."""
    init_from: Path | None = None
    """Another run's weights to start from; None if a checkpoint has them."""
    text_metrics: tuple[TextMetric, ...] = ()
    """`eval.metrics`, loaded, and the user's functions."""
    hooks: UserHooks = field(default_factory=UserHooks)
    trackers: Trackers = field(default_factory=Trackers)
    state: TrainState = field(default_factory=TrainState)
    """As of the last completed step."""
    # `build_skeleton`
    model_config: PretrainedConfig = field(init=False)
    skeleton: PreTrainedModel = field(init=False)
    # `prepare_data`
    rows: TokenizedRows = field(init=False)
    plan: BatchPlan = field(init=False)
    evaluation: EvaluationRows = field(init=False)
    # `build_model`
    sharded: ShardedModel = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    identity: Identity = field(init=False)
    # `start_run`
    num_steps: int = field(init=False)
    best_metric: BestMetric = field(init=False)
    """What makes a checkpoint the best."""
    metrics: MetricsLog = field(init=False)
    data: RunData = field(init=False)
    # `train`
    log: StepLog = field(init=False)
    guard: SkipGuard = field(init=False)
    stops: StopRequests = field(init=False)
    writer: CheckpointWriter = field(init=False)

    @functools.cached_property
    def trainable(self) -> list[torch.nn.Parameter]:
        """In the model's order; to walk all modules for them takes the host milliseconds in a step."""
        return [parameter for parameter in self.sharded.model.parameters() if parameter.requires_grad]

    @functools.cached_property
    def reductions(self) -> ReductionWatch:
        """Of the sharded model."""
        return ReductionWatch(self.sharded.model)


def setup_run(config: RecipeConfig, objective: Objective, hooks: UserHooks) -> Run:
    """Check what needs no data, open the run folder and choose the checkpoint to resume from. Collective. What is wrong with the
    two YAML files, the run folder or its checkpoints is a `UserError` on every rank."""
    start_logging()  # for programs that begin a run by themselves; a recipe has done it
    # Of the config alone.
    check_trackers(config.tracking)
    check_hooks(config, hooks, objective)
    check_metric(
        config.eval, [*map(metric_name, config.eval.metrics), *hooks.metrics], list_sets(config.data), objective.name_metrics()
    )
    check_adapter_config(config)
    # Of the accelerate YAML and the processes.
    own = type(objective) if config.has_own_objective else None
    given = {"model": hooks.model, "loss": hooks.loss, "objective's code": own, **hooks.metrics}
    code = {name: describe_code(each) for name, each in given.items() if each is not None}
    started_with = {**describe_config(config), **code}
    accelerator = build_accelerator(config.run.timeout_s, config.run.num_threads, started_with=started_with)
    connect_devices(accelerator)
    enter_phase("opening the run", counts_cpu=True)
    stored: Any = {"has_adapter": is_enabled(config.adapter), "base_dtype": config.adapter.base_dtype}
    dtype = on_all_ranks(lambda: frozen_dtype(accelerator, config.model.frozen_dtype, **stored))
    on_all_ranks(lambda: check_trained_dtype(accelerator, config.model.trained_dtype))
    metrics = load_text_metrics(config.eval.metrics, hooks.metrics, hooks.given)
    # Of the run folder and its checkpoints. Settings have paths relative to it, so that a resume works from any directory.
    run_folder = open_run(config)
    on_rank_0(lambda: check_export_places(config, run_folder))
    on_rank_0(lambda: prepare_push(config))
    resolved = {"model.frozen_dtype": str(dtype).removeprefix("torch."), "mixed_precision": accelerator.mixed_precision}
    resolved |= {name: code.get(name) for name in ("model", "loss", "objective's code")}
    settings = {**dotted_keys(write_paths(config, run_folder)), **resolved}
    if settings.get("data.packing") == "auto":  # known and compared with the model
        del settings["data.packing"]
    enter_phase("choosing the checkpoint", counts_cpu=True)
    resume_from = choose_checkpoint(run_folder, config.checkpoint.resume, settings, type(config))
    init_from = find_weights(config.model.init_from) if config.model.init_from and resume_from is None else None
    return Run(config, objective, accelerator, dtype, run_folder, settings, resume_from, init_from, metrics, hooks)


def open_run(config: Any) -> Path:
    """Open the run folder of a config with `run` and `train`, and lock it against a second run. Collective. A folder that cannot
    be used, or a batch that does not fit the number of processes, is a `UserError` on every rank."""
    check_global_batch_size(config.train, world_size())
    run_folder = open_run_folder(config)
    keep_stacks_in(run_folder)
    on_rank_0(lambda: lock_run_folder(run_folder))
    return run_folder
