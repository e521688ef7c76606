"""The training loop, one for all recipes: step, evaluate, save.

A step never waits for the device: label counts come from the batch plan, and losses and gradient norms stay on the device
until they are read together every `log_every_steps`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from toolkit.checkpoint.load import best_saved_value
from toolkit.checkpoint.save import CheckpointWriter
from toolkit.checkpoint.state import TrainState
from toolkit.config.load import RecipeConfig
from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.data.collate import Batch, load_micro_batches, move_to
from toolkit.distributed.comm import rank, world_size
from toolkit.distributed.rng import seed_all
from toolkit.distributed.signals import StopRequests
from toolkit.distributed.watchdog import at, working
from toolkit.files.json_lines import encode_json_line
from toolkit.launch.run_folder import open_inside
from toolkit.loss import share_of_global_mean, summed_loss
from toolkit.parallel.wrap import accumulating, reduction_groups
from toolkit.tracking.memory import save_memory
from toolkit.tracking.progress import Progress
from toolkit.tracking.step_log import StepFigures, StepLog
from toolkit.training.after_step import (
    Session,
    after_step,
    finish_writing,
    is_due,
    say_without_gain,
    should_stop_early,
    stop_after_end,
)
from toolkit.training.goal import build_goal
from toolkit.training.optim import clip_gradients, learning_rate
from toolkit.training.own import StepInfo
from toolkit.training.own_loss import summed_own_loss
from toolkit.training.parameter_checks import SMALLEST_SHOWING_LR, UPDATES_UNTIL_MOVED, ParameterWatch
from toolkit.training.run import Run
from toolkit.training.skip_guard import SkipGuard

logger = logging.getLogger("toolkit")


def train(config: RecipeConfig, run: Run, state: TrainState) -> TrainState:
    """Train from the step after `state.step` to the end. Collective.

    Evaluates every `eval.every_steps` or `every_epochs`, and at the end. Saves as `checkpoint` says, after each new best value if
    `checkpoint.keep_best` is set, and at the end. Stops early after `eval.early_stopping_patience` evaluations without gain.

    Raises:
        Stopped: a signal reached a rank; the last completed step has a checkpoint.
        UserError: a checkpoint cannot be written, or `optim.max_skipped_steps` updates in a row were skipped; on every rank.
    """
    # A finished run returns here; an interrupted evaluation is still due.
    working("starting the training")
    bar = Progress(run.num_steps, state.step, enabled=rank() == 0)
    goal = build_goal(config.eval, run.evaluation)
    state.evaluation_due |= run.num_steps == 0 or (state.step == 0 and config.eval.at_start)
    if (state.step >= run.num_steps or should_stop_early(config, state)) and not state.evaluation_due:
        logger.info(f"nothing left to train: the run is complete at step {state.step}")
        say_without_gain(state, goal)
        return state
    best_saved = best_saved_value(run.folder, goal, state.step)
    # Signals and saves are handled from here until both are finished.
    with (
        StopRequests() as stops,
        CheckpointWriter(run.folder, run.sharded, run.optimizer, run.identity, config.checkpoint, goal, best_saved) as writer,
    ):
        log = StepLog(run.metrics, run.sharded, bar, run.train_rows, state.skips, config.optim.max_skipped_steps)
        guard = SkipGuard(config.optim, state.skips, reduction_groups(run.sharded.model))
        session = Session(config, run, state, bar, log, guard, stops, writer)
        if not (state.evaluation_due and after_step(session, is_resumed=True)):
            _train_steps(session)
        save_memory(run.folder, log.memory, run.metrics)
        finish_writing(session)
        stop_after_end(session)
    bar.close()
    return state


def _train_steps(session: Session) -> None:
    """Run the remaining steps, each with what is due after it. Collective."""
    config, run, state, log = session.config, session.run, session.state, session.log
    first_step = state.step + 1
    watch = ParameterWatch(run.sharded.model)
    micro_batches = _load_micro_batches(config, run, first_step)
    num_showing, num_skipped_before = 0, state.skips.num_skipped
    run.sharded.model.train()
    log.restart_clock()
    for step_number in range(first_step, run.num_steps + 1):
        # 1. One optimizer update.
        at("loading rows", step_number)
        step = run.plan.step(step_number)
        with _profiled(config.profile.steps, step_number, run.folder):
            lr = learning_rate(config.optim, step_number, run.num_steps, run.plan.steps_per_epoch)
            log.add(train_step(session, step, micro_batches, lr, watch if step_number == first_step else None))
        state.step, state.metrics = step_number, {}
        state.evaluation_due = step_number == run.num_steps or is_due(step_number, config.eval, run.plan)
        # 2. After a few updates that are large enough to show, every trainable parameter must have moved.
        num_showing += lr >= SMALLEST_SHOWING_LR
        if num_showing == UPDATES_UNTIL_MOVED and lr >= SMALLEST_SHOWING_LR:
            log.flush()
            num_showing -= state.skips.num_skipped - num_skipped_before  # skipped updates moved nothing
            num_skipped_before = state.skips.num_skipped
            if num_showing == UPDATES_UNTIL_MOVED:
                watch.check_moved()
        # 3. Log, evaluate, save.
        is_logged = state.evaluation_due or step_number % config.log_every_steps == 0
        if is_logged:
            log.flush()
        if run.own.after_step is not None:
            working("after_step", step_number)
            loss = log.last_loss if is_logged else None
            run.own.after_step(StepInfo(step=step_number, num_steps=run.num_steps, epoch=step.epoch, learning_rate=lr, loss=loss))
        if after_step(session):
            break
    watch.check_frozen()


def train_step(
    session: Session, step: Step, micro_batches: Iterator[tuple[MicroBatch, Batch]], lr: float, watch: ParameterWatch | None
) -> StepFigures:
    """One optimizer update over one global batch. Collective.

    Args:
        micro_batches: this rank's; the step consumes its own.
        watch: checks gradients and moments after the first step; None for later steps.
    """
    # Forward and backward of each micro-batch; gradients add up.
    config, run = session.config, session.run
    model, device = run.sharded.model, run.sharded.accelerator.device
    losses: list[tuple[MicroBatch, torch.Tensor]] = []
    for micro_batch, batch in micro_batches:
        assert micro_batch.step == step.step
        at("forward and backward", step.step)
        seed_all("step", config.train.seed, step.step, rank(), micro_batch.index)
        if config.log_row_ids:
            _log_row_ids(run, micro_batch)
        session.log.memory.see(batch)
        batch = move_to(device, batch)
        with accumulating(run.sharded, is_last=micro_batch.is_last):
            loss_sum = _summed_loss(session, batch)
            share_of_global_mean(loss_sum, step.num_label_tokens, world_size()).backward()
        losses.append((micro_batch, loss_sum.detach()))
        if micro_batch.is_last:
            break
        at("loading rows", step.step)
    # Clip, judge, update. `judge` reduces the loss and the finite check over the ranks without a host sync.
    at("update", step.step)
    if watch:
        watch.check_gradients()
    grad_norm = clip_gradients(model, config.optim.max_grad_norm)
    total_loss, skipped = session.guard.judge(torch.stack([loss for _, loss in losses]).sum(), grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.found_inf = skipped  # type: ignore[attr-defined]  # the fused kernel reads it, as from GradScaler
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    if watch:
        watch.check_moments(run.optimizer)
    return StepFigures(step, lr, total_loss, grad_norm, skipped, losses)


def _summed_loss(session: Session, batch: Batch) -> torch.Tensor:
    """The loss of a micro-batch that training counts, summed over its label tokens; a scalar. Collective under FSDP."""
    run, smoothing = session.run, session.config.optim.label_smoothing
    if run.own.loss is not None:
        return summed_own_loss(run.sharded.model, batch, run.own.loss)
    return summed_loss(run.sharded.model, batch, smoothing)[0]


def _load_micro_batches(config: RecipeConfig, run: Run, first_step: int) -> Iterator[tuple[MicroBatch, Batch]]:
    return load_micro_batches(
        run.train_rows,
        run.plan.iterate(first_step, run.num_steps, rank()),
        run.evaluation.collator,
        num_workers=config.data.num_loader_workers,
        pin_memory=run.sharded.accelerator.device.type == "cuda",
    )


def _log_row_ids(run: Run, micro_batch: MicroBatch) -> None:
    """Append the row ids of this rank's micro-batch to `rows-<rank>.jsonl`; without rows, an empty list."""
    row_ids = [run.train_rows[row]["row_id"] for row in micro_batch.rows]
    line = {"step": micro_batch.step, "micro_batch": micro_batch.index, "row_ids": row_ids}
    path = run.folder / f"rows-{rank():05d}.jsonl"
    try:
        with open_inside(run.folder, path.name, "ab") as file:
            file.write(encode_json_line(line))
    except OSError as error:
        run.metrics.note_failure(path, error)


@contextlib.contextmanager
def _profiled(window: list[int] | None, step: int, folder: Path) -> Iterator[None]:
    """Profile the steps `window[0]` to `window[1]`: one Chrome trace per step and rank in the run folder's `profile/`."""
    if window is None or not window[0] <= step <= window[1]:
        yield
        return
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profiler:
        yield
    (folder / "profile").mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "profile" / f"step-{step:08d}-rank-{rank():05d}.json"))
