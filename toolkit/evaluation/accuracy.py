"""Loss and accuracy of an image classifier over all ranks; each evaluation image counts exactly once.

Shapes: `B` images, `H` height, `W` width, `C` classes.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from toolkit.data.batch_plan import cut
from toolkit.data.sources.images import ImageSets
from toolkit.distributed.comm import rank, reduce_on_cpu, world_size
from toolkit.loss import summed_cross_entropy
from toolkit.parallel.gather import evaluation_model
from toolkit.parallel.wrap import ShardedModel


@torch.no_grad()
def evaluate_accuracy(sharded: ShardedModel, images: ImageSets, batch_size_rows: int) -> dict[str, float]:
    """Return `loss` (nats per image), `accuracy` (percent), `num_rows` and `rows_per_s`. Collective.

    Args:
        batch_size_rows: images per batch and process; in fp32 it never changes the result.
    """
    start_s = time.perf_counter()
    device, num_rows = sharded.accelerator.device, len(images.evaluation)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_correct = torch.zeros((), dtype=torch.int64, device=device)
    with evaluation_model(sharded, unshard="never") as (model, _):
        for of_ranks in cut(np.arange(num_rows), np.ones(num_rows), world_size(), batch_size_rows):
            rows = of_ranks[rank()]
            # A rank without rows runs one whose label does not count, so that the collectives of all ranks match.
            pixels_B1HW, labels_B = images.collate(images.evaluation, rows or [0], device, is_dummy=not rows)
            logits_BC = model(pixels_B1HW)
            loss_sum += summed_cross_entropy(logits_BC, labels_B)
            num_correct += (logits_BC.argmax(dim=-1) == labels_B).sum()
    totals = torch.tensor([loss_sum.item(), num_correct.item()], dtype=torch.float64)
    total_loss, total_correct = reduce_on_cpu(totals, dist.ReduceOp.SUM).tolist()
    seconds = time.perf_counter() - start_s
    return {
        "loss": total_loss / num_rows,
        "accuracy": 100 * total_correct / num_rows,
        "num_rows": num_rows,
        "rows_per_s": num_rows / seconds,
    }
