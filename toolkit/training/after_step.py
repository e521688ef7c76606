"""What happens after a step: evaluation, checkpoint, early stop, or the end because of a signal."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from toolkit.checkpoint.find import Goal
from toolkit.checkpoint.save import CheckpointWriter, Save
from toolkit.checkpoint.state import TrainState
from toolkit.config.load import RecipeConfig
from toolkit.config.schema import CheckpointConfig, EvalConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.distributed.comm import raise_together
from toolkit.distributed.signals import StopRequests
from toolkit.distributed.watchdog import at, working
from toolkit.errors import Stopped
from toolkit.evaluation.loop import evaluate
from toolkit.evaluation.metrics import own_figures
from toolkit.tracking.progress import Progress
from toolkit.tracking.step_log import StepLog
from toolkit.tracking.trackers import close_trackers, log_to_trackers
from toolkit.training.run import Run
from toolkit.training.skip_guard import SkipGuard

logger = logging.getLogger("toolkit")


@dataclass(frozen=True)
class Session:
    """State of one call of `loop.train`."""

    config: RecipeConfig
    run: Run
    state: TrainState
    bar: Progress
    log: StepLog
    guard: SkipGuard
    stops: StopRequests
    writer: CheckpointWriter


def after_step(session: Session, *, is_resumed: bool = False) -> bool:
    """Evaluate and save if they are due after `state.step`; return whether training is over. Collective.

    Args:
        is_resumed: the checkpoint of `state.step` exists, but a signal interrupted its evaluation: save again, with metrics.

    Raises:
        Stopped: on every rank, after a signal; the checkpoint has been written.
    """
    # 1. Signals come first, so that a stop never waits for an evaluation.
    config, run, state = session.config, session.run, session.state
    if signal_name := _agree(session):
        _stop(session, signal_name)
    # 2. Evaluate before saving: the manifest holds the metrics of its step.
    if state.evaluation_due:
        _evaluate_and_log(session)
    # 3. Save at the end, on a new best value, and every `checkpoint.every_steps` or `every_epochs`.
    if run.num_steps == 0:
        return True
    over = state.step == run.num_steps or should_stop_early(config, state)
    keeps = config.checkpoint.keep_best > 0 and session.writer.is_best(state)
    if state.step > 0 and (over or keeps or is_resumed or is_due(state.step, config.checkpoint, run.plan)):
        _save(session, wait=over)
    if over and state.step < run.num_steps:
        logger.info(
            f"stopping at step {state.step}: {config.eval.early_stopping_patience} evaluations without gain in "
            f"{config.eval.best_metric}"
        )
    if over:
        say_without_gain(state, session.writer.goal)
    return over


def say_without_gain(state: TrainState, goal: Goal) -> None:
    """Print a line if no evaluated step is better than the start."""
    best = math.nan if state.best_value is None else state.best_value
    is_evaluated = state.best_value is not None or state.num_evaluations_without_gain > 0
    if state.start_value is not None and is_evaluated and not goal.is_better(best, state.start_value):
        start = f"{goal.metric} {state.start_value:.4g} before the first step"
        logger.info(f"no evaluated step is better than the start: {start}, at best {best:.4g} after it")


def _agree(session: Session) -> str | None:
    """Return the stop signal that all ranks agree on, if any, and log finished saves. Collective.

    Raises:
        UserError: a rank could not write its checkpoint or its metrics; on every rank.
    """
    writer, metrics = session.writer, session.run.metrics
    agreement = session.stops.agree(write_failed=writer.has_failed or metrics.error is not None)
    if agreement.write_failed:
        finish_writing(session)
    _log_save(session, writer.take_finished())
    return agreement.signal_name


def finish_writing(session: Session) -> None:
    """Wait for the current save. Collective.

    Raises:
        UserError: a rank could not write its checkpoint or its metrics; on every rank.
    """
    working("saving", session.state.step)
    _log_save(session, session.writer.finish())
    raise_together(session.run.metrics.error)


def _evaluate_and_log(session: Session) -> None:
    """Evaluate, log the metrics, and update the best value or the count of evaluations without gain. Collective.

    Raises:
        Stopped: a signal arrived meanwhile; the resumed run repeats the evaluation.
    """
    config, run, state = session.config, session.run, session.state
    if len(run.evaluation.rows) == 0:
        state.evaluation_due = False
        return

    # Ranks check for signals between batches, so that a stop never waits for a long evaluation.
    def between_batches() -> None:
        at("evaluation", state.step)
        if signal_name := _agree(session):
            raise _SignalInEvaluation(signal_name)

    at("evaluation", state.step)
    predictions = run.folder / f"predictions-{state.step}.jsonl"
    try:
        figures: dict[str, Any] = evaluate(config.eval, run.sharded, run.evaluation, predictions, between_batches)
    except _SignalInEvaluation as stop:
        _stop(session, str(stop))
    # metrics.jsonl, trackers, terminal
    text_fields = {"rouge_tokenizer": run.evaluation.rouge_tokenizer.name} if "rougeL" in figures else {}
    goal = session.writer.goal
    run.metrics.write("eval", state.step, **figures, **text_fields, measured_on=goal.measured_on)
    log_to_trackers(run.sharded.accelerator, {f"eval/{name}": value for name, value in figures.items()}, state.step)
    of_sources = (name for name in figures if name.startswith("loss/"))
    own = own_figures(run.evaluation.metrics, figures)
    shown = ("loss", *of_sources, "bits_per_byte", "token_accuracy", "rouge1", "rougeL", *own, "percent_distinct", "rows_per_s")
    logger.info(f"evaluation at step {state.step}: " + ", ".join(f"{n} {figures[n]:.4g}" for n in shown if n in figures))
    state.metrics, state.evaluation_due = figures, False
    if run.own.after_evaluation is not None:
        working("after_evaluation", state.step)
        run.own.after_evaluation({"step": state.step, **figures})
    session.log.restart_clock()
    # best value and early stopping
    value = figures[goal.metric]
    if state.step == 0:  # the start is no gain, and has no weights to keep
        state.start_value = None if math.isnan(value) else value
    elif goal.is_better(value, state.best_value):
        state.best_value, state.num_evaluations_without_gain = value, 0
    else:
        state.num_evaluations_without_gain += 1


class _SignalInEvaluation(Exception):
    """All ranks agreed to stop between two batches of an evaluation."""


def _stop(session: Session, signal_name: str) -> NoReturn:
    """Save the last completed step and stop. Collective."""
    if session.state.step > 0 and session.run.num_steps > 0:
        _save(session, wait=True)
    _end(session, signal_name)


def stop_after_end(session: Session) -> None:
    """Stop before the export if a signal arrived after the last step boundary. Collective.

    Raises:
        Stopped: on every rank.
    """
    if signal_name := session.stops.agree_now().signal_name:
        _end(session, signal_name)


def _end(session: Session, signal_name: str) -> NoReturn:
    step = session.state.step
    command = "the same command" + ("" if session.config.checkpoint.resume == "auto" else " with checkpoint.resume auto")
    place = f"after step {step}, with a checkpoint: {command} goes on from there" if step else "before the first step"
    session.bar.close()
    logger.info(f"stopped by {signal_name} {place}")
    close_trackers(session.run.sharded.accelerator)
    raise Stopped  # keep the process group: with one, the process exits without Python's finalization (`errors._leave`)


def _save(session: Session, *, wait: bool) -> None:
    """Save a checkpoint; with `wait`, it is on disk when this returns. Collective."""
    at("saving", session.state.step)
    session.log.flush()
    metrics = session.run.metrics
    metrics.sync()
    raise_together(metrics.error)  # a checkpoint needs all metrics lines up to its step: a resume keeps those
    session.guard.remember(session.state.skips)
    _log_save(session, session.writer.save(session.state, wait=wait))
    _log_save(session, session.writer.take_finished())
    session.log.restart_clock()


def _log_save(session: Session, save: Save | None) -> None:
    """Log a finished checkpoint."""
    if save is not None:
        for remark in save.remarks:
            logger.info(remark)
        session.run.metrics.write(
            "checkpoint", save.step, blocking_s=save.blocking_s, write_s=save.write_s, num_bytes=save.num_bytes
        )


def should_stop_early(config: RecipeConfig, state: TrainState) -> bool:
    """Whether `eval.early_stopping_patience` ends the run here."""
    patience = config.eval.early_stopping_patience
    return patience is not None and state.num_evaluations_without_gain >= patience


def is_due(step: int, config: EvalConfig | CheckpointConfig, plan: BatchPlan) -> bool:
    """Whether an action that repeats every `every_steps` or `every_epochs` is due after `step`; without both: never."""
    if config.every_epochs is not None:
        return plan.is_due(step, config.every_epochs)
    return config.every_steps is not None and step % config.every_steps == 0
