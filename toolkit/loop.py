"""The training loop, one for all recipes: step, evaluate, save.

Nothing in a step waits for the device: label counts come from the plan, losses and gradient norms stay on the device and
are read together every `log_every_steps`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.accelerator import peak_memory_gib, synchronize
from toolkit.checkpoint import Identity, TrainState, prune_checkpoints, save_checkpoint
from toolkit.config import RecipeConfig
from toolkit.data.collate import Batch, load_micro_batches
from toolkit.data.plan import BatchPlan, MicroBatch, Step
from toolkit.distributed import rank, reduce_on_cpu, seed_all, world_size
from toolkit.evaluation import HIGHER_IS_BETTER, EvaluationRows, evaluate, is_better
from toolkit.losses import share_of_global_mean, summed_loss
from toolkit.optim import clip_gradients, learning_rate
from toolkit.parameter_checks import SMALLEST_SHOWING_LR, UPDATES_UNTIL_MOVED, ParameterWatch
from toolkit.sharding import ShardedModel
from toolkit.tracking import MetricsLog, Progress, log_to_trackers

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Run:
    """What a run is made of."""

    folder: Path
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    plan: BatchPlan
    train_rows: Dataset
    evaluation: EvaluationRows
    identity: Identity
    metrics: MetricsLog
    num_steps: int


def num_steps(config: RecipeConfig, plan: BatchPlan) -> int:
    """Optimizer updates of the whole run."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    assert config.train.num_epochs is not None  # load_config sees to it
    return plan.num_steps(config.train.num_epochs)


def train(config: RecipeConfig, run: Run, state: TrainState) -> TrainState:
    """Train from the step after `state.step` to the end. Collective.

    Evaluates every `eval.every_steps` and at the end; saves every `checkpoint.every_steps`, after an evaluation with gain
    where `checkpoint.keep_best`, and at the end. Stops early after `eval.stop_after` evaluations without gain.
    """
    bar = Progress(run.num_steps, state.step, enabled=rank() == 0)
    if run.num_steps == 0:
        _evaluate_and_log(config, run, state, bar)
        return state
    if state.step >= run.num_steps or _gains_no_more(config, state):
        bar.say(f"nothing left to train: the run is complete at step {state.step}")
        return state
    if state.step == 0 and config.eval.at_start:
        _evaluate_and_log(config, run, state, bar)
    watch = ParameterWatch(run.sharded.model)
    log = _StepLog(run, bar)
    micro_batches = _load_micro_batches(config, run, state.step + 1)
    first_step = state.step + 1
    num_showing_updates = 0
    run.sharded.model.train()
    for step_number in range(first_step, run.num_steps + 1):
        step = run.plan.step(step_number)
        with _profiled(config.profile.steps, step_number, run.folder):
            lr = learning_rate(config.optim, step_number, run.num_steps, run.plan.steps_per_epoch)
            loss_sum, grad_norm = train_step(config, run, step, micro_batches, lr, watch if step_number == first_step else None)
        log.add(step, loss_sum, grad_norm, lr)
        num_showing_updates += lr >= SMALLEST_SHOWING_LR
        if num_showing_updates == UPDATES_UNTIL_MOVED and lr >= SMALLEST_SHOWING_LR:
            watch.check_moved()
        state.step, state.metrics = step_number, {}
        is_last = step_number == run.num_steps
        if is_last or step_number % config.log_every_steps == 0:
            log.flush()
        gained = stop = False
        if is_last or _is_due(step_number, config.eval.every_steps):
            log.flush()
            gained = _evaluate_and_log(config, run, state, bar)
            stop = _gains_no_more(config, state)
            log.restart_clock()
        keeps = gained and config.checkpoint.keep_best > 0
        if is_last or stop or keeps or _is_due(step_number, config.checkpoint.every_steps):
            log.flush()
            _save_and_log(config, run, state)
            log.restart_clock()
        if stop:
            bar.say(
                f"stopping at step {step_number}: {config.eval.stop_after} evaluations without gain in {config.eval.best_metric}"
            )
            break
    watch.check_frozen()
    bar.close()
    return state


def train_step(
    config: RecipeConfig,
    run: Run,
    step: Step,
    micro_batches: Iterator[tuple[MicroBatch, Batch]],
    lr: float,
    watch: ParameterWatch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer update over one global batch. Collective.

    Args:
        micro_batches: this rank's; as many as the step has are taken.
        watch: checks gradients and moments of the first step.

    Returns:
        This rank's summed loss in nats and the global gradient norm before clipping; fp32 scalars on the device.
    """
    model, device = run.sharded.model, run.sharded.accelerator.device
    loss_sum = torch.zeros((), device=device)
    for micro_batch, batch in micro_batches:
        assert micro_batch.step == step.step
        seed_all("step", config.train.seed, step.step, rank(), micro_batch.index)
        if config.log_row_ids:
            _log_row_ids(run, micro_batch)
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        # FSDP reduces every micro-batch's gradients: waiting would keep them whole on each rank. DDP keeps them anyway.
        accumulates = isinstance(model, DistributedDataParallel) and not micro_batch.is_last
        with cast(DistributedDataParallel, model).no_sync() if accumulates else contextlib.nullcontext():
            micro_batch_sum, _ = summed_loss(model, batch)
            share_of_global_mean(micro_batch_sum, step.num_label_tokens, world_size()).backward()
        loss_sum += micro_batch_sum.detach()
        if micro_batch.is_last:
            break
    if watch:
        watch.check_gradients()
    # Offloaded gradients lie on the CPU; the log reads all figures from one device.
    grad_norm = clip_gradients(model, config.optim.max_grad_norm).to(device, non_blocking=True)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    if watch:
        watch.check_moments(run.optimizer)
    return loss_sum, grad_norm


class _StepLog:
    """Figures of the steps since the last read, on the device until `flush` reads them all at once."""

    def __init__(self, run: Run, bar: Progress) -> None:
        self.run, self.bar = run, bar
        self.pending: list[tuple[Step, torch.Tensor, torch.Tensor, float]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the step time what was no step."""
        self.start_s = time.perf_counter()

    def add(self, step: Step, loss_sum: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Remember a step's figures; nothing is read."""
        self.pending.append((step, loss_sum, grad_norm, lr))

    def flush(self) -> None:
        """Read the pending figures, sum losses over the ranks, write a line a step. Collective."""
        if not self.pending:
            return
        accelerator = self.run.sharded.accelerator
        read = torch.stack([torch.stack([loss, norm]) for _, loss, norm, _ in self.pending]).double().cpu()
        synchronize(accelerator.device)
        seconds = time.perf_counter() - self.start_s
        losses = reduce_on_cpu(read[:, 0].contiguous(), dist.ReduceOp.SUM).tolist()
        norms = read[:, 1].tolist()
        tokens_per_s = sum(step.num_tokens for step, *_ in self.pending) / seconds
        for (step, _, _, lr), loss, norm in zip(self.pending, losses, norms, strict=True):
            figures = {
                "epoch": step.epoch,
                "loss": loss / step.num_label_tokens,
                "learning_rate": lr,
                "grad_norm": norm,
                "tokens_per_s": tokens_per_s,
                "step_time_s": seconds / len(self.pending),
                "peak_memory_gib": peak_memory_gib(accelerator.device),
                "num_rows": len(step.rows),
                "num_tokens": step.num_tokens,
                "num_label_tokens": step.num_label_tokens,
            }
            self.run.metrics.write("train", step.step, **figures)
            log_to_trackers(accelerator, {f"train/{name}": value for name, value in figures.items()}, step.step)
        self.bar.update(step.step, loss=figures["loss"], learning_rate=lr, tokens_per_s=tokens_per_s)
        self.pending.clear()
        self.restart_clock()


def _evaluate_and_log(config: RecipeConfig, run: Run, state: TrainState, bar: Progress) -> bool:
    """Evaluate, write the figures, and say whether `best_metric` gained. Collective."""
    if len(run.evaluation.rows) == 0:
        return False
    predictions = run.folder / f"predictions-{state.step}.jsonl"
    figures: dict[str, Any] = evaluate(config.eval, run.sharded, run.evaluation, predictions)
    run.metrics.write("eval", state.step, **figures)
    log_to_trackers(run.sharded.accelerator, {f"eval/{name}": value for name, value in figures.items()}, state.step)
    shown = ("loss", "bits_per_byte", "token_accuracy", "rouge1", "rougeL", "percent_distinct", "rows_per_s")
    bar.say(f"evaluation at step {state.step}: " + ", ".join(f"{n} {figures[n]:.4g}" for n in shown if n in figures))
    state.metrics = figures
    metric = config.eval.best_metric
    if is_better(metric, figures[metric], state.best_value):
        state.best_value, state.num_evaluations_without_gain = figures[metric], 0
        return True
    state.num_evaluations_without_gain += 1
    return False


def _save_and_log(config: RecipeConfig, run: Run, state: TrainState) -> None:
    """Save a checkpoint, prune older ones, write a line about it. Collective."""
    start_s = time.perf_counter()
    folder = save_checkpoint(run.folder, run.sharded, run.optimizer, state, run.identity)
    blocking_s = time.perf_counter() - start_s
    metric = config.eval.best_metric
    prune_checkpoints(run.folder, config.checkpoint, metric, metric in HIGHER_IS_BETTER)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    run.metrics.write("checkpoint", state.step, blocking_s=blocking_s, num_bytes=num_bytes)


def _load_micro_batches(config: RecipeConfig, run: Run, first_step: int) -> Iterator[tuple[MicroBatch, Batch]]:
    return load_micro_batches(
        run.train_rows,
        run.plan.iterate(first_step, run.num_steps, rank()),
        run.evaluation.collator,
        num_workers=config.data.num_loader_workers,
        pin_memory=run.sharded.accelerator.device.type == "cuda",
    )


def _log_row_ids(run: Run, micro_batch: MicroBatch) -> None:
    """Append the rows of this rank's micro-batch to `rows-<rank>.jsonl`; ranks without rows say so with an empty list."""
    row_ids = [run.train_rows[row]["row_id"] for row in micro_batch.rows]
    line = {"step": micro_batch.step, "micro_batch": micro_batch.index, "row_ids": row_ids}
    with (run.folder / f"rows-{rank():05d}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _profiled(window: list[int] | None, step: int, folder: Path) -> Iterator[None]:
    """A torch profiler over the steps `window[0]` to `window[1]`; a Chrome trace a step and rank goes into the run folder."""
    if window is None or not window[0] <= step <= window[1]:
        yield
        return
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profiler:
        yield
    (folder / "profile").mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(folder / "profile" / f"step-{step:08d}-rank-{rank():05d}.json"))


def _gains_no_more(config: RecipeConfig, state: TrainState) -> bool:
    return config.eval.stop_after is not None and state.num_evaluations_without_gain >= config.eval.stop_after


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
