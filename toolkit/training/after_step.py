"""What the loop calls between two steps: evaluation, checkpoint, early stop, or the end because of a signal."""

import gc
import logging
import math
from typing import Any, NoReturn

from toolkit.checkpoint.find import best_value
from toolkit.checkpoint.save import Save
from toolkit.config.schema import CheckpointConfig, EvalConfig
from toolkit.data.batch_plan import BatchPlan, Step
from toolkit.distributed.comm import on_rank_0, raise_together
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import Stopped
from toolkit.evaluation.generate import describe_flaws
from toolkit.evaluation.loop import evaluate
from toolkit.evaluation.metrics import own_figures
from toolkit.tracking.metrics_log import save_memory
from toolkit.tracking.trackers import close_trackers, log_to_trackers
from toolkit.training.setup import Run
from toolkit.training.user_functions import EvalMetrics, StepInfo

logger = logging.getLogger("toolkit")


def say_without_gain(run: Run) -> None:
    """Print a line if no evaluated step is better than the start."""
    state, best_metric = run.state, run.best_metric
    best = math.nan if state.best_value is None else state.best_value
    is_evaluated = state.best_value is not None or state.num_evaluations_without_gain > 0
    if state.start_value is not None and is_evaluated and not best_metric.is_better(best, state.start_value):
        start = f"{best_metric.name} {state.start_value:.4g} before the first step"
        logger.info(f"no evaluated step is better than the start: {start}, at best {best:.4g} after it")


def agree(run: Run) -> str | None:
    """Return the stop signal that all ranks agree on, if any, and log finished saves. Collective. A checkpoint or metrics that a
    rank could not write, or gradients that differ as in `ReductionWatch`, are a `UserError` on every rank."""
    write_failed = run.writer.has_failed or run.metrics.error is not None
    agreement = run.stops.agree(write_failed=write_failed, fingerprint=run.reductions.fingerprint())
    if agreement.differ:
        run.reductions.check()
    if agreement.write_failed:
        finish_writing(run)
    _log_save(run, run.writer.take_finished())
    return agreement.signal_name


def finish_writing(run: Run) -> None:
    """Wait for the current save; a checkpoint or metrics that a rank could not write are a `UserError` on every rank.
    Collective."""
    enter_phase("saving", run.state.step, counts_cpu=True)
    _log_save(run, run.writer.finish())
    raise_together(run.metrics.error)


def evaluate_and_log(run: Run) -> str | None:
    """Evaluate, log the metrics, and update the best value or the count of evaluations without gain. Collective. Returns the
    signal that interrupted the evaluation, which a resumed run repeats; None if it was completed."""
    state, best_metric = run.state, run.best_metric
    if len(run.evaluation.rows) == 0:
        state.evaluation_due = False
        return None
    # A metric of one's own may fail in the last evaluation: then only that is lost.
    if run.evaluation.metrics and state.step == run.num_steps > 0:
        save(run, wait=True)

    # Ranks check for signals between batches, so that a stop never waits for a long evaluation.
    def between_batches() -> None:
        enter_phase("evaluation", state.step)
        gc.collect(1)  # the loop has turned Python's own collections off
        if signal_name := agree(run):
            raise _SignalInEvaluation(signal_name)

    enter_phase("evaluation", state.step)
    predictions = run.folder / f"predictions-{state.step}.jsonl"
    try:
        figures: dict[str, Any] = evaluate(run.config.eval, run.sharded, run.evaluation, predictions, between_batches)
    except _SignalInEvaluation as signal:
        return str(signal)
    # metrics.jsonl, trackers, terminal
    text_fields = {"rouge_tokenizer": run.evaluation.rouge_tokenizer.name} if "rougeL" in figures else {}
    run.metrics.write("eval", state.step, **figures, **text_fields, measured_on=best_metric.measured_on)
    log_to_trackers(run.trackers, "eval", figures, state.step)
    of_sets = [f"{name}/{figure}" for name in run.evaluation.sets for figure in ("loss", "rougeL")]
    own = own_figures(run.evaluation.metrics, figures)
    shown = ("loss", "bits_per_byte", "token_accuracy", "rouge1", "rougeL", *own, "percent_distinct", *of_sets, "rows_per_s")
    logger.info(f"evaluation at step {state.step}: " + ", ".join(f"{n} {figures[n]:.4g}" for n in shown if n in figures))
    if flaws := describe_flaws(figures):
        logger.info(flaws)
    state.metrics, state.evaluation_due = figures, False
    if run.hooks.after_evaluation is not None:
        enter_phase("after_evaluation", state.step, counts_cpu=True)
        given = EvalMetrics(step=state.step, **figures)
        given.model, given.optimizer = run.sharded.model, run.optimizer
        run.hooks.after_evaluation(given)
    run.log.restart_clock()
    # best value and early stopping; somebody may have removed the best checkpoint
    writer = run.writer
    writer.best_saved = on_rank_0(
        lambda: writer.best_saved if writer.is_writing else best_value(run.folder, best_metric, state.step)
    )
    value = figures.get(best_metric.name, math.nan)  # a metric of one's own may leave it out
    if state.step == 0:  # the start is not a gain, and has no weights to keep
        state.start_value = None if math.isnan(value) else value
    elif best_metric.is_better(value, state.best_value):
        state.best_value, state.num_evaluations_without_gain = value, 0
    else:
        state.num_evaluations_without_gain += 1
    return None


class _SignalInEvaluation(Exception):
    """All ranks agreed to stop between two batches of an evaluation."""


def stop(run: Run, signal_name: str) -> NoReturn:
    """End the run because of a signal, after its checkpoint: every rank raises `Stopped`. Collective."""
    step = run.state.step
    command = "the same command" + ("" if run.config.checkpoint.resume == "auto" else " with checkpoint.resume auto")
    place = f"after step {step}, with a checkpoint: {command} goes on from there" if step else "before the first step"
    run.log.bar.close()
    logger.info(f"stopped by {signal_name} {place}")
    close_trackers(run.trackers)
    raise Stopped  # keep the process group: with one, the process exits without Python's finalization (`errors._leave`)


def finish_training(run: Run) -> None:
    """Wait for the last save, and say how the training ended. Collective. Every rank raises `Stopped` if a signal arrived after
    the last step boundary, a `UserError` if a rank could not write its checkpoint or its metrics."""
    config, step = run.config.eval, run.state.step
    if step < run.num_steps:
        logger.info(f"stopping at step {step}: {config.early_stopping_patience} evaluations without gain in {config.best_metric}")
    say_without_gain(run)
    save_memory(run.folder, run.log.memory, run.metrics)
    finish_writing(run)
    if signal_name := run.stops.agree_now().signal_name:
        stop(run, signal_name)
    run.log.bar.close()


def save(run: Run, *, wait: bool) -> None:
    """Save a checkpoint, but none before the first step; with `wait`, it is on disk when this returns. Collective. If a rank
    could not write its checkpoint or its metrics, that is a `UserError` on every rank."""
    if run.state.step == 0 or run.num_steps == 0:
        return
    enter_phase("saving", run.state.step)
    run.reductions.check()  # the exchange of the last step has not been read
    run.log.flush()
    run.metrics.sync()
    raise_together(run.metrics.error)  # a checkpoint needs all metrics lines up to its step: a resume keeps those
    run.guard.save_to(run.state.skips)
    _log_save(run, run.writer.save(run.state, wait=wait))
    _log_save(run, run.writer.take_finished())
    run.log.restart_clock()


def _log_save(run: Run, save: Save | None) -> None:
    """Log a finished checkpoint."""
    if save is not None:
        for remark in save.remarks:
            logger.info(remark)
        run.metrics.write("checkpoint", save.step, blocking_s=save.blocking_s, write_s=save.write_s, num_bytes=save.num_bytes)


def call_after_step(run: Run, step: Step, lr: float, *, is_logged: bool) -> None:
    """Call the user's hook after a step, if there is one."""
    if run.hooks.after_step is not None:
        enter_phase("after_step", step.step, counts_cpu=True)
        loss = run.log.last_loss if is_logged else None
        objects: dict[str, Any] = {"model": run.sharded.model, "optimizer": run.optimizer}
        info = StepInfo(step=step.step, num_steps=run.num_steps, epoch=step.epoch, learning_rate=lr, loss=loss, **objects)
        run.hooks.after_step(info)


def is_over(run: Run) -> bool:
    """Whether `train.max_steps` or `eval.early_stopping_patience` ends the run after `run.state.step`."""
    patience = run.config.eval.early_stopping_patience
    return run.state.step >= run.num_steps or (patience is not None and run.state.num_evaluations_without_gain >= patience)


def is_save_due(run: Run) -> bool:
    """Whether `run.state` is the best so far, where these are kept, or `checkpoint` asks for a save after its step."""
    is_kept = run.config.checkpoint.keep_best > 0 and run.writer.is_best(run.state)
    return is_kept or is_due(run.state.step, run.config.checkpoint, run.plan)


def is_due(step: int, config: EvalConfig | CheckpointConfig, plan: BatchPlan) -> bool:
    """Whether an action that repeats every `every_steps` or `every_epochs` is due after `step`; without both: never."""
    if config.every_epochs is not None:
        return plan.is_due(step, config.every_epochs)
    return config.every_steps is not None and step % config.every_steps == 0
