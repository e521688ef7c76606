"""A whole run in text order: from the two YAML files to the exported model. `recipes/t5.py` and `recipes/llm.py` call it.

Each phase has a file beside this one: `setup.py` → `model.py` → `data.py` → `model.py` → `run.py` → `loop.py` → `run.py`.
`from toolkit import finetune` is this function, for code of one's own: docs/python_api.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.config.load import RecipeConfig
from toolkit.data.cache_folders import cache_folder
from toolkit.data.sources.own_function import check_datasets, save_datasets
from toolkit.distributed.comm import world_size
from toolkit.distributed.watchdog import naming_lost_ranks
from toolkit.errors import SIGNALS, UserError
from toolkit.evaluation.metrics import TextFunction
from toolkit.launch.accelerator import cudnn_attention, pads_lengths
from toolkit.launch.process_state import process_state_kept
from toolkit.models.load import own_class, save_built
from toolkit.objectives import name_objective
from toolkit.objectives.objective import Objective
from toolkit.tracking.trackers import close_trackers, start_trackers
from toolkit.training import loop
from toolkit.training.data import prepare_data
from toolkit.training.model import build_model, build_skeleton
from toolkit.training.run import finish, log_run_summary, release, start_run
from toolkit.training.setup import setup_run
from toolkit.training.user_functions import EvalMetrics, OwnLoss, StepInfo, UserHooks

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

FULL_MEMORY = (
    "the memory of a device is full: lower train.micro_batch_size_rows, or eval.batch_size_rows if it was an evaluation (both "
    "leave the results as they are), or data.max_length_tokens; `python -m toolkit plan` predicts what fits"
)
"""Printed below torch's own error."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has come to."""

    folder: Path
    """The run folder."""
    export: Path | None
    """The exported model; None if nothing was exported."""
    step: int
    """The last step."""
    metrics: dict[str, float]
    """Of the evaluation after the last step; empty without evaluation rows."""
    best_value: float | None
    """The best `eval.best_metric` of the evaluated steps."""


def finetune(
    config: RecipeConfig,
    *,
    objective: Objective | None = None,
    model: type[PreTrainedModel] | PreTrainedModel | None = None,
    train: Dataset | None = None,
    evaluation: Dataset | None = None,
    metrics: Mapping[str, TextFunction] | None = None,
    loss: OwnLoss | None = None,
    after_step: Callable[[StepInfo], object] | None = None,
    after_evaluation: Callable[[EvalMetrics], object] | None = None,
) -> Result:
    """Fine-tune the model of `config`, sharded as the accelerate YAML says: train, evaluate, save, export. Collective.

    The same command or call resumes a run that was stopped. At its end, this closes the process groups and puts back what it has
    changed in the process and in libraries (`toolkit/launch/process_state.py`).

    Args:
        config: of a recipe, as `SummarizationConfig` or `LLMConfig`.
        objective: what to train for, where it is not that of the config: docs/python_api.md.
        model: a class in the place of transformers' own for `model.name_or_path`, or a built model, whose weights it brings.
        train: the rows to train on, in place of `data.source`; columns are chosen as those of a file.
        evaluation: the evaluation split; None: as `data.eval_fraction` says.
        metrics: functions of (predictions, references), by the names of their figures; they join `eval.metrics`. With `on_rows`,
            of (predictions, rows).
        loss: (logits BTV, labels BT) → the loss summed over the label tokens, in place of cross-entropy in training.
        after_step: called on every rank after each optimizer update.
        after_evaluation: called on every rank with the `EvalMetrics` of each evaluation.

    Raises:
        UserError: anything wrong with the YAML files, the data, the model, the run folder or the arguments; on every rank.
        Stopped: after a signal; the last completed step has a checkpoint.
        RankLost: the process of another rank has died.
    """
    # What the caller has given.
    given = train if evaluation is None else evaluation
    hooks = UserHooks(
        model=model, given=given, metrics=metrics or {}, loss=loss, after_step=after_step, after_evaluation=after_evaluation
    )
    config, objective = name_objective(check_datasets(config, train, evaluation), objective)

    in_run = cudnn_attention(config.model.cudnn_attention), own_class(model, config.model, objective)
    with process_state_kept(), _released_on_error() as on_error, in_run[0], in_run[1]:
        # Checks of the config, the processes, the run folder, the checkpoint to resume from.
        run = setup_run(config, objective, hooks)
        on_error.callback(close_trackers, run.trackers)

        # The model on the meta device: what is wrong with it is reported before data and weights load.
        if isinstance(model, torch.nn.Module):
            built = save_built(model, config.model, cache_folder(config.data.cache_dir))
            run.config = dataclasses.replace(config, model=built)
        build_skeleton(run)

        # Rows: text → tokens on disk → the batch plan (which rows each step takes) and the evaluation split.
        if train is not None:
            run.config = save_datasets(run.config, train, evaluation)
        of_model, pads = (run.model_config, run.skeleton), pads_lengths(run.accelerator, run.config.data.pad_lengths)
        run.rows, run.plan, run.evaluation = prepare_data(
            objective, run.config, run.text_metrics, *of_model, world_size(), pads=pads
        )

        # Trackers, before the weights: one that cannot start is reported now.
        start_trackers(run.trackers, run.config, run.folder, run.resume_from)

        # Model → frozen or adapted → shards → optimizer → checks of the model.
        build_model(run)

        # What the model computes once as it starts, as the reference of pairs.
        about, goes_on = (run.config, run.sharded, run.rows, run.evaluation), run.resume_from is not None
        run.evaluation = objective.complete_evaluation(*about, run.folder, goes_on)

        # Resume from this run's last checkpoint, if there is one; print what begins. Train: step, evaluate, save.
        start_run(run)
        log_run_summary(run)
        loop.train(run)

        # Export, reload, compare, and print the results.
        export = finish(run)
    state = run.state
    return Result(folder=run.folder, export=export, step=state.step, metrics=state.metrics, best_value=state.best_value)


@contextlib.contextmanager
def _released_on_error() -> Iterator[contextlib.ExitStack]:
    """Let a notebook go on after an error or an interrupt: call what the yielded stack holds, end the watchdog, open the run
    folder, restore signal handlers.

    Several ranks keep all that until they exit: another rank may still be in the run.
    """
    if world_size() > 1:  # nothing was released then
        what = "these processes are connected already, by a run that failed or an Accelerator of yours"
        raise UserError(f"{what}: start them anew, and build none before finetune")
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
    on_error = contextlib.ExitStack()
    try:
        with naming_lost_ranks():
            yield on_error
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(FULL_MEMORY)
        if world_size() == 1:
            on_error.close()
            release()
            for number, handler in handlers.items():
                if handler is not None:  # one that Python has not set
                    signal.signal(number, handler)
        raise
