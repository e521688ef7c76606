"""The training loop, one for all recipes: step, evaluate, save.

A step never waits for the device: label counts come from the batch plan, and losses and gradient norms stay on the device
until they are read together every `log_every_steps`.
"""

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.data.collate import Batch, load_micro_batches, move_to
from toolkit.distributed.comm import rank, world_size
from toolkit.distributed.rng import seed_all
from toolkit.distributed.signals import StopRequests
from toolkit.distributed.watchdog import enter_phase
from toolkit.files.json_lines import encode_json_line
from toolkit.loss import scale_to_global_mean
from toolkit.parallel.wrap import accumulating, reduction_groups
from toolkit.tracking.step_log import StepFigures
from toolkit.training.after_step import (
    agree,
    call_after_step,
    evaluate_and_log,
    finish_training,
    is_due,
    is_over,
    is_save_due,
    save,
    say_without_gain,
    stop,
)
from toolkit.training.optim import clip_gradients, learning_rate
from toolkit.training.parameter_checks import ParameterWatch
from toolkit.training.router_loss import RouterLoss
from toolkit.training.run import build_log, build_writer
from toolkit.training.setup import Run
from toolkit.training.skip_guard import SkipGuard
from toolkit.training.user_functions import summed_own_loss

logger = logging.getLogger("toolkit")

COLLECT_EVERY_STEPS = 50


def train(run: Run) -> None:
    """Train from the step after `run.state.step` to the end of the run. Collective.

    Evaluates every `eval.every_steps` or `every_epochs`, and at the end. Saves as `checkpoint` says, after each new best value if
    `checkpoint.keep_best` is set, and at the end. Stops early after `eval.early_stopping_patience` evaluations without gain.

    Every rank raises `Stopped` after a signal to one of them, with a checkpoint of the last completed step, and a `UserError` if
    a checkpoint cannot be written, or `optim.max_skipped_steps` updates in a row were skipped.
    """
    config, state, plan = run.config, run.state, run.plan
    # A complete run returns here, unless a signal interrupted its last evaluation.
    enter_phase("starting the training", counts_cpu=True)
    state.evaluation_due |= run.num_steps == 0 or (state.step == 0 and config.eval.at_start)
    if is_over(run) and not state.evaluation_due:
        logger.info(f"nothing left to train: the run is complete at step {state.step}")
        return say_without_gain(run)

    # Signals and saves are handled from here until both are finished. A run may begin with an evaluation that is due.
    with StopRequests() as run.stops, build_writer(run) as run.writer, _garbage_kept(), run.reductions.noting():
        next_step = state.step + 1
        watch = ParameterWatch(run.sharded.model, state.skips.num_skipped)
        micro_batches = _load_micro_batches(run, next_step)
        run.sharded.model.train()
        run.guard = SkipGuard(config.optim, state.skips, reduction_groups(run.sharded.model))
        run.log = build_log(run)
        for number in range(state.step if state.evaluation_due else next_step, max(next_step, run.num_steps + 1)):
            # 1. One optimizer update. After the first updates, every trainable parameter must have moved.
            if number >= next_step:
                enter_phase("loading rows", number)
                step = plan.step(number)
                lr = learning_rate(config.optim, number, run.num_steps, plan)
                with _profiled(config.profile.steps, number, run.folder):
                    run.log.add(train_step(run, step, micro_batches, lr, watch if number == next_step else None))
                state.step, state.metrics = number, {}
                state.evaluation_due = number == run.num_steps or is_due(number, config.eval, plan)
                is_check_due = watch.count_update(lr)
                # 2. Log: read the figures of the last steps from the device.
                is_logged = state.evaluation_due or number % config.log_every_steps == 0
                if is_logged or is_check_due:
                    run.log.flush()
                if is_check_due:
                    watch.check_moved(state.skips.num_skipped)
                call_after_step(run, step, lr, is_logged=is_logged)
            # 3. Agree on signals and failed writes, before an evaluation, which agrees between its batches too.
            signal_name = agree(run)
            # 4. Evaluate before saving: the manifest holds the metrics of its step.
            if state.evaluation_due and not signal_name:
                signal_name = evaluate_and_log(run)
            # 5. Save. A checkpoint whose evaluation a signal interrupted is saved again, with the metrics.
            ends = signal_name is not None or is_over(run)
            if ends or number < next_step or is_save_due(run):
                save(run, wait=ends)
            # 6. Stop; or collect Python's garbage, on all ranks at the same step.
            if signal_name:
                stop(run, signal_name)
            if ends:
                break
            if number % COLLECT_EVERY_STEPS == 0:
                gc.collect()
        watch.check_frozen()
        finish_training(run)


def train_step(
    run: Run, step: Step, micro_batches: Iterator[tuple[MicroBatch, Batch]], lr: float, watch: ParameterWatch | None
) -> StepFigures:
    """One optimizer update over one global batch. Collective. Of this rank's `micro_batches` the step consumes its own. `watch`
    checks gradients and moments after the first step; None for later steps."""
    # Forward and backward of each micro-batch; gradients add up.
    config, model, device = run.config, run.sharded.model, run.sharded.accelerator.device
    losses: list[tuple[MicroBatch, torch.Tensor]] = []
    second_sums: list[torch.Tensor] = []
    router = RouterLoss(run, step) if config.optim.router_aux_loss != "off" else None
    if router and config.optim.router_aux_loss == "global":
        micro_batches = iter(router.count(micro_batches))
    for micro_batch, batch in micro_batches:
        assert micro_batch.step == step.step
        run.reductions.micro_batch = (step.step, micro_batch.index)
        enter_phase("forward and backward", step.step)
        seed_all("step", config.train.seed, step.step, rank(), micro_batch.index)
        if config.log_row_ids:
            _log_row_ids(run, micro_batch)
        run.log.memory.record_batch(run.objective, batch, len(micro_batch.packs))
        batch = move_to(device, batch)
        documents_BT = batch.pop("documents", None)
        with accumulating(run.sharded, is_last=micro_batch.is_last):
            if run.hooks.loss is None:
                loss_sum, second_sum = run.objective.loss(model, batch, config.optim.label_smoothing)
                second_sums += [second_sum] if run.objective.logs_metrics else []
            else:
                loss_sum = summed_own_loss(model, batch, run.objective.inputs[-1], run.hooks.loss)
            share = scale_to_global_mean(loss_sum, step.num_label_tokens, world_size())
            (share + router.share(micro_batch, documents_BT) if router else share).backward()
        losses.append((micro_batch, loss_sum.detach()))
        if micro_batch.is_last:
            break
        enter_phase("loading rows", step.step)
    # Clip, judge, update. `judge` reduces the loss and the finite check over the ranks without a host sync.
    enter_phase("update", step.step)
    if watch:
        watch.check_gradients()
        run.reductions.check()
    grad_norm = clip_gradients(model, config.optim.max_grad_norm, run.trainable)
    total_loss, skipped = run.guard.should_skip(torch.stack([loss for _, loss in losses]).sum(), grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.found_inf = skipped  # type: ignore[attr-defined]  # the fused kernel reads it, as from GradScaler
    run.optimizer.number = step.step  # type: ignore[attr-defined]
    run.writer.copier.make_device_wait()  # the current save needs its copy before a weight changes
    run.optimizer.step()
    # Gradients of DDP are views of its buckets: new ones beside these would hold the gradients twice while they accumulate.
    run.optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    if watch:
        watch.check_moments(run.optimizer)
    figures = StepFigures(step, lr, total_loss, grad_norm, skipped, losses)
    if router:
        figures.routing = router.reduced_figures()
    if second_sums:
        figures.second_sums = run.guard.reduced(torch.stack(second_sums).sum(dim=0))
    return figures


def _load_micro_batches(run: Run, first_step: int) -> Iterator[tuple[MicroBatch, Batch]]:
    """This rank's, lazily: a loader draws from the random state, which a checkpoint before the next step saves as it was."""
    on_gpu = run.sharded.accelerator.device.type == "cuda"
    num_workers, collator = run.config.data.num_loader_workers, run.evaluation.collator
    if run.config.optim.router_aux_loss != "off":
        collator = dataclasses.replace(collator, numbers_documents=True)  # type: ignore[arg-type]  # a causal model has it
    for micro_batch, batch in load_micro_batches(
        run.rows.train,
        run.plan.iterate(first_step, run.num_steps, rank()),
        collator,
        num_workers=int(on_gpu) if num_workers is None else num_workers,  # a GPU would wait for the host's collating
        pin_memory=on_gpu,
    ):
        # By their number the loss is divided.
        planned = int(run.plan.num_label_tokens[list(micro_batch.rows)].sum())
        found = 0 if micro_batch.is_dummy else len(batch["labels"])
        if found != planned:
            what = f"micro-batch {micro_batch.index} of step {micro_batch.step} has {found} labels on rank {rank()}"
            raise RuntimeError(f"{what}, but its rows have {planned}: tokens would not be trained")
        yield micro_batch, batch


def _log_row_ids(run: Run, micro_batch: MicroBatch) -> None:
    """Append the row ids of this rank's micro-batch to `rows-<rank>.jsonl`; without rows, an empty list."""
    row_ids = [run.rows.train[row]["row_id"] for row in micro_batch.rows]
    line = {"step": micro_batch.step, "micro_batch": micro_batch.index, "row_ids": row_ids}
    path = run.folder / f"rows-{rank():05d}.jsonl"
    with run.metrics.noting_failure(path):
        run.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed
        with path.open("ab") as file:
            file.write(encode_json_line(line))


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Context in which Python collects no garbage by itself: each rank would at another step, while the others wait for it.

    So does torchtitan (tools/utils.py, GarbageCollection). What there is at the start is frozen, so that a collection is short,
    unless the caller has frozen objects: Python can only unfreeze all of them.
    """
    was_enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


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
