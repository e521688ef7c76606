"""Collects the figures of steps on the device until `flush` reads them all at once and writes a line per step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from toolkit.checkpoint.state import SkipHistory
from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.distributed.comm import gather_objects, reduce_on_cpu, world_size
from toolkit.distributed.device import synchronize
from toolkit.distributed.progress import Progress
from toolkit.errors import UserError, first_of
from toolkit.parallel.wrap import ShardedModel
from toolkit.tracking.metrics_log import MetricsLog, StepMemory
from toolkit.tracking.trackers import Trackers, log_to_trackers

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("toolkit")

MOST_ROWS_NAMED = 16


@dataclass
class StepFigures:
    """The figures of one step; the tensors are fp32 on the device."""

    step: Step
    lr: float
    loss_sum: torch.Tensor
    """Summed over all ranks, in nats, scalar."""
    grad_norm: torch.Tensor
    """Before clipping, scalar."""
    skipped: torch.Tensor
    """1 if the update was skipped, scalar."""
    micro_batches: list[tuple[MicroBatch, torch.Tensor]] = field(default_factory=list)
    """This rank's micro-batches with their summed losses, to find the rows of a loss that is not finite."""
    routing: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """`RouterLoss.figures` of all ranks; empty without an auxiliary loss."""
    second_sums: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Those of `Objective.loss`, summed over all ranks, where training lines have its metrics; else empty."""


class StepLog:
    """Collects the figures of steps and writes a line for each. Collective: every rank must build and call it."""

    def __init__(
        self, metrics: MetricsLog, sharded: ShardedModel, bar: Progress, rows: Dataset, skips: SkipHistory, max_skipped_steps: int
    ) -> None:
        self.metrics, self.sharded, self.bar, self.rows = metrics, sharded, bar, rows
        self.trackers = Trackers()
        self.skips, self.max_skipped_steps = skips, max_skipped_steps
        self.memory = StepMemory(sharded.accelerator.device)
        self.num_input_tokens_seen = 0
        self.seconds_at_peak: np.ndarray | None = None
        self.metrics_of: Callable[..., dict[str, float]] | None = None
        self.pending: list[StepFigures] = []
        self.last_loss: float | None = None
        self.last_skipped: list[tuple[int, list[int]]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restart step time and peak memory, so that they count only steps."""
        self.memory.restart()
        self.start_s = time.perf_counter()

    def add(self, figures: StepFigures) -> None:
        """Remember a step's figures, without a host read."""
        self.pending.append(figures)

    def flush(self) -> None:
        """Read the pending figures and write a line per step. After `optim.max_skipped_steps` skipped updates in a row, a
        `UserError` on every rank names their rows. Collective."""
        if not self.pending:
            return
        # Read everything in one transfer.
        device = self.sharded.accelerator.device
        rows = [
            (torch.stack([f.loss_sum, f.grad_norm, f.skipped]), f.second_sums.to(f.loss_sum), f.routing.flatten().to(f.loss_sum))
            for f in self.pending
        ]
        read = torch.stack([torch.cat(row) for row in rows]).cpu().double().tolist()
        synchronize(device)
        seconds = time.perf_counter() - self.start_s
        tokens_per_s = sum(f.step.num_tokens for f in self.pending) / seconds
        speed = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": tokens_per_s / world_size()}
        if self.seconds_at_peak is not None:
            at_peak = sum(self.seconds_at_peak[list(f.step.rows)].sum() for f in self.pending)
            speed["mfu_percent"] = float(100 * at_peak / (seconds * world_size()))
        peak_gib = reduce_on_cpu(torch.tensor(self.memory.read(), dtype=torch.float64), dist.ReduceOp.MAX).item()
        # Write a line per step, and count skipped updates.
        too_many: UserError | None = None
        for f, (loss_sum, grad_norm, skipped, *others) in zip(self.pending, read, strict=True):
            loss, num = loss_sum / f.step.num_label_tokens, f.second_sums.numel()
            second_sums, routing = others[:num], others[num:]
            self.num_input_tokens_seen += f.step.num_tokens
            figures = {
                "epoch": f.step.epoch,
                "loss": loss,
                "learning_rate": f.lr,
                "grad_norm": grad_norm,
                **speed,
                "step_time_s": seconds / len(self.pending),
                "peak_memory_gib": peak_gib,  # on the rank with most
                "num_rows": len(f.step.rows),
                "num_tokens": f.step.num_tokens,
                "num_label_tokens": f.step.num_label_tokens,
                "num_input_tokens_seen": self.num_input_tokens_seen,
            }
            if second_sums and self.metrics_of is not None:
                figures |= self.metrics_of(loss_sum, second_sums, f.step.num_label_tokens, math.nan)
            if routing:
                of_routers, load = describe_load(np.reshape(routing, f.routing.shape) / f.step.num_tokens)
                figures |= of_routers
                self.metrics.write("router", f.step.step, **load)
            self.metrics.write("train", f.step.step, **figures)
            log_to_trackers(self.trackers, "train", figures, f.step.step)
            if self._count(f, loss, grad_norm, bool(skipped)) and too_many is None:
                too_many = self._too_many()  # now, because a later successful step resets the count
        self.last_loss = loss
        self.bar.update(f.step.step, loss=loss, learning_rate=f.lr, speed=speed)
        self.pending.clear()
        self.restart_clock()
        if too_many is not None:
            raise too_many

    def _count(self, f: StepFigures, loss: float, grad_norm: float, skipped: bool) -> bool:
        """Add a step to the skip history; return whether too many were skipped in a row. Collective if the step was skipped."""
        if not skipped:
            self.skips.num_in_a_row = 0
            self.last_skipped.clear()
            return False
        self.skips.num_skipped += 1
        self.skips.num_in_a_row += 1
        row_ids = self._suspects(f)
        self.last_skipped.append((f.step.step, row_ids))
        self.metrics.write("skip", f.step.step, loss=loss, grad_norm=grad_norm, row_ids=row_ids)
        what = f"step {f.step.step}: update skipped on all ranks (loss {loss:.4g}, gradient norm {grad_norm:.4g})"
        logger.warning(f"{what}; rows {first_of(row_ids, MOST_ROWS_NAMED)}; {self.skips.num_skipped} skipped so far")
        return self.skips.num_in_a_row >= self.max_skipped_steps

    def _suspects(self, f: StepFigures) -> list[int]:
        """Row ids of all ranks' micro-batches with a loss that is not finite; of the entire step if there is none. Collective."""
        rows = [row for micro_batch, loss in f.micro_batches if not loss.isfinite().item() for row in micro_batch.rows]
        found = sorted({row for part in gather_objects(rows) for row in part}) or f.step.rows
        return sorted(self.rows[int(row)]["row_id"] for row in found)

    def _too_many(self) -> UserError:
        """The error, equal on all ranks."""
        steps = ", ".join(str(step) for step, _ in self.last_skipped)
        rows = first_of(sorted({row for _, row_ids in self.last_skipped for row in row_ids}), MOST_ROWS_NAMED)
        last, why = self.last_skipped[-1][0], "because the loss or the gradient was not finite or spiked"
        what = f"{self.skips.num_in_a_row} updates in a row were skipped, up to step {last} (optim.max_skipped_steps), {why}"
        remedy = "take another run.name with a lower optim.lr and this run as model.init_from"
        look = "look at these rows (metrics.jsonl has all of them)"
        return UserError(f"{what}; steps {steps}: rows {rows}; {look}, or {remedy}", printed_by="run")


def describe_load(figures_LX: np.ndarray) -> tuple[dict[str, float], dict[str, Any]]:
    """Of a step's routers, by `RouterLoss.figures` per token; and the shares of tokens by expert in the least even layer."""
    loads_LE = figures_LX[:, 1:]
    parts_LE = np.maximum(loads_LE / loads_LE.sum(axis=1, keepdims=True), 1e-12)
    entropies_L = -(parts_LE * np.log(parts_LE)).sum(axis=1) / np.log(loads_LE.shape[1])  # 1 is even
    layer, busiest, loss = int(entropies_L.argmin()), float(loads_LE.max()), float(figures_LX[:, 0].sum())
    figures = {"router_aux_loss": loss, "router_busiest_share": busiest, "router_load_entropy": float(entropies_L.mean())}
    return figures, {"layer": layer, "load": loads_LE[layer].round(6).tolist()}
