"""Train the small convnet of PyTorch's FSDP tutorial on images of digits, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/mnist.py --config recipes/configs/mnist_digits.yaml
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from mnist_config import ConvNetConfig, MnistConfig, check_mnist_config

from toolkit.config.load import load_config
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from mnist_images import ImageSets

    from toolkit.data.batch_plan import BatchPlan, Step
    from toolkit.parallel.wrap import ShardedModel
    from toolkit.tracking.metrics_log import MetricsLog
    from toolkit.tracking.step_log import StepFigures

logger = logging.getLogger("toolkit")

SMALLEST_SIDE = 6
"""Smallest image side, in pixels, that survives two 3 x 3 convolutions and a pooling."""


def main() -> None:
    config = load_config(MnistConfig, description=__doc__, check=check_mnist_config)

    # These imports take seconds, so a wrong flag has been reported before them.
    import numpy as np
    import torch
    from mnist_images import load_images

    from toolkit.data.batch_plan import BatchPlan
    from toolkit.distributed.comm import on_all_ranks, on_rank_0, world_size
    from toolkit.distributed.device import describe_device
    from toolkit.distributed.rng import seed_all
    from toolkit.distributed.watchdog import enter_phase
    from toolkit.launch.accelerator import build_accelerator, connect_devices
    from toolkit.launch.rank_consistency import compare_ranks, describe_config
    from toolkit.launch.run_folder import save_run_config
    from toolkit.parallel.units import describe
    from toolkit.parallel.wrap import check_wrap, shard_model
    from toolkit.tools.report.facts import save_record
    from toolkit.tools.report.page import draw_curves, save_run_page
    from toolkit.training.run import leave, open_metrics
    from toolkit.training.setup import open_run

    accelerator = build_accelerator(config.run.timeout_s, config.run.num_threads, started_with=describe_config(config))
    connect_devices(accelerator)
    run_folder = open_run(config)
    logger.info(describe_device(accelerator.device))

    # Images → the batch plan (which images each step takes). For the plan, an image is a row of one token with one label.
    enter_phase("loading images", counts_cpu=True)
    images = on_all_ranks(lambda: load_images(config.data, SMALLEST_SIDE))
    digest = hashlib.sha256()
    for part in (images.train, images.evaluation):
        digest.update(part.pixels_NHW.numpy().tobytes() + part.labels_N.numpy().tobytes())
    compare_ranks({"the hash of the images": digest.hexdigest()})
    ones = np.ones(len(images.train), dtype=np.int64)
    plan = BatchPlan(ones, ones, config.train, world_size(), bucket_by_length=False)
    num_steps = plan.num_steps(config.train.num_epochs) if config.train.num_epochs else config.train.max_steps or 0
    logger.info(f"{len(images.train):,} training images, {len(images.evaluation):,} held-out ones; {num_steps:,} steps")

    # Model → shards → torch's own optimizer.
    seed_all("weights", config.train.seed)
    model: Any = build_convnet(config.model, images)
    on_all_ranks(lambda: check_wrap(accelerator, model, config.train.activation_checkpointing))
    sharded = shard_model(accelerator, model, checkpointing=config.train.activation_checkpointing)
    optimizer = torch.optim.Adadelta(sharded.model.parameters(), lr=config.optim.lr)
    logger.info(describe(sharded.units))

    # Train and save. This recipe cannot resume.
    metrics = open_metrics(config, run_folder)
    metrics.truncate_after(-1)
    save_run_config(config, run_folder)
    save_record(run_folder, sharded.units)
    train(config, sharded, optimizer, images, plan, num_steps, metrics)
    enter_phase("saving", num_steps)
    metrics.write("checkpoint", num_steps, **save_weights(sharded, run_folder / "model.safetensors"))
    enter_phase("drawing the curves", counts_cpu=True)
    on_rank_0(lambda: draw_curves(metrics.load(), run_folder / "curves.png"))
    save_run_page(run_folder)
    leave()


def train(
    config: MnistConfig,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    images: ImageSets,
    plan: BatchPlan,
    num_steps: int,
    metrics: MetricsLog,
) -> None:
    """Take all steps. Evaluate every `eval_every_epochs`, lower the learning rate after every epoch. Collective."""
    import torch

    from toolkit.checkpoint.state import SkipHistory
    from toolkit.distributed.progress import Progress
    from toolkit.distributed.watchdog import enter_phase
    from toolkit.tracking.step_log import StepLog

    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=config.optim.gamma)
    bar = Progress(num_steps, 0, config.log_every_steps)
    log = StepLog(metrics, sharded, bar, [], SkipHistory(), max_skipped_steps=1)
    for number in range(num_steps + 1):
        enter_phase("step", number)
        if number > 0:
            log.add(train_step(config, sharded, optimizer, images, plan, plan.step(number)))
        evaluates = number in (0, num_steps) or plan.is_due(number, config.eval_every_epochs)
        if evaluates or number % config.log_every_steps == 0:
            log.flush()
        if evaluates:
            enter_phase("evaluation", number)
            figures = evaluate(sharded, images, config.eval_batch_size_rows)
            metrics.write("eval", number, **figures)
            logger.info(f"evaluation at step {number}: loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.2f} %")
            log.restart_clock()
        if plan.is_due(number, every_epochs=1):
            schedule.step()
    bar.close()


def build_convnet(config: ConvNetConfig, images: ImageSets) -> torch.nn.Module:
    """Build two convolutions, a pooling and two linear layers: images B1HW → logits (B, number of classes)."""
    from torch import nn

    height, width = ((side - 4) // 2 for side in images.train.pixels_NHW.shape[1:])
    layers = {
        "conv1": nn.Conv2d(1, 32, 3), "relu1": nn.ReLU(), "conv2": nn.Conv2d(32, 64, 3), "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2), "dropout1": nn.Dropout(config.conv_dropout), "flatten": nn.Flatten(),
        "fc1": nn.Linear(64 * height * width, config.hidden_size), "relu3": nn.ReLU(),
        "dropout2": nn.Dropout(config.linear_dropout), "fc2": nn.Linear(config.hidden_size, images.num_classes),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def train_step(
    config: MnistConfig, sharded: ShardedModel, optimizer: torch.optim.Optimizer, images: ImageSets, plan: BatchPlan, step: Step
) -> StepFigures:
    """Make one update over one global batch, the same on any number of processes. Collective."""
    import torch
    import torch.distributed as dist

    from toolkit.distributed.comm import rank, world_size
    from toolkit.distributed.rng import seed_all
    from toolkit.loss import scale_to_global_mean, summed_cross_entropy
    from toolkit.tracking.step_log import StepFigures
    from toolkit.training.optim import clip_gradients

    device, lr = sharded.accelerator.device, optimizer.param_groups[0]["lr"]
    loss_sum = torch.zeros((), device=device)
    for micro_batch in plan.micro_batches(step, rank()):
        seed_all("step", config.train.seed, step.step, rank(), micro_batch.index)
        rows = [row for (row,) in micro_batch.packs]
        pixels_B1HW, labels_B = images.collate(images.train, rows, device, is_dummy=micro_batch.is_dummy)
        batch_sum = summed_cross_entropy(sharded.model(pixels_B1HW), labels_B, config.optim.label_smoothing)
        scale_to_global_mean(batch_sum, step.num_label_tokens, world_size()).backward()
        loss_sum += batch_sum.detach()
    grad_norm = clip_gradients(sharded.model, max_norm=None)
    optimizer.step()
    optimizer.zero_grad()
    if world_size() > 1:
        dist.all_reduce(loss_sum)
    return StepFigures(step, lr, loss_sum, grad_norm, skipped=torch.zeros_like(loss_sum))


def evaluate(sharded: ShardedModel, images: ImageSets, batch_size_rows: int) -> dict[str, float]:
    """Return `loss` (nats per image), `accuracy` (percent), `num_rows` and `rows_per_s`; each image counts once. Collective.

    Args:
        batch_size_rows: images per batch and process; in fp32 it never changes the result.
    """

    import numpy as np
    import torch
    import torch.distributed as dist

    from toolkit.data.batch_plan import cut
    from toolkit.distributed.comm import rank, reduce_on_cpu, world_size
    from toolkit.loss import summed_cross_entropy
    from toolkit.parallel.gather import evaluation_model

    start_s = time.perf_counter()
    device, num_rows = sharded.accelerator.device, len(images.evaluation)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), evaluation_model(sharded, unshard="never") as (model, _):
        for of_ranks in cut(np.arange(num_rows), np.ones(num_rows), world_size(), batch_size_rows):
            rows = of_ranks[rank()]
            # A rank without rows runs one whose label does not count, so that the collectives of all ranks match.
            pixels_B1HW, labels_B = images.collate(images.evaluation, rows or [0], device, is_dummy=not rows)
            logits_BC = model(pixels_B1HW)
            loss_sum += summed_cross_entropy(logits_BC, labels_B)
            num_correct += (logits_BC.argmax(dim=-1) == labels_B).sum()
    totals = torch.tensor([loss_sum.item(), num_correct.item()], dtype=torch.float64)
    total_loss, total_correct = reduce_on_cpu(totals, dist.ReduceOp.SUM).tolist()
    rows_per_s = num_rows / (time.perf_counter() - start_s)
    accuracy = 100 * total_correct / num_rows
    return {"loss": total_loss / num_rows, "accuracy": accuracy, "num_rows": num_rows, "rows_per_s": rows_per_s}


def save_weights(sharded: ShardedModel, path: Path) -> dict[str, float]:
    """Gather the parameters into rank 0's host memory and write them as safetensors, whole or not at all. Collective.

    Returns:
        `blocking_s`, the time that every rank waited; `write_s`; and `num_bytes` of the file.

    Raises:
        UserError: the file cannot be written; on every rank.
    """

    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from toolkit.distributed.comm import on_rank_0, rank
    from toolkit.distributed.watchdog import enter_phase
    from toolkit.errors import UserError
    from toolkit.files.durable import give_usual_mode, written_beside
    from toolkit.parallel.gather import unsharded_parameters

    start_s = time.perf_counter()
    gathered = unsharded_parameters(sharded)  # all ranks gather, one unit at a time
    weights = {name: whole.to("cpu", copy=True).contiguous() for name, whole in gathered if rank() == 0}
    gathered_s = time.perf_counter()

    def write() -> int:
        try:
            with written_beside(path) as unfinished:
                save_file(weights, unfinished)
                give_usual_mode(unfinished)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} could not be written: {error}") from None
        return path.stat().st_size

    enter_phase("saving", counts_cpu=True)
    num_bytes = on_rank_0(write)
    end_s = time.perf_counter()
    return {"blocking_s": end_s - start_s, "write_s": end_s - gathered_s, "num_bytes": num_bytes}


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
