"""Held-out loss and generated texts, over all ranks, each row exactly once.

The loss is a sum over label tokens divided by their number, so batch size, process count and padding do not show in it.
ROUGE is scored row by row on the rank that generated the row, and averaged in row order on rank 0.

Shapes: `B` rows, `S` source positions, `T` target positions, `V` vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from toolkit.config.schema import EvalConfig
from toolkit.distributed.comm import rank, reduce_on_cpu, world_size
from toolkit.distributed.rng import random_state_kept
from toolkit.evaluation.generate import _gather_scores, _generate, _on_device
from toolkit.evaluation.rows import EvaluationRows, plan_evaluation
from toolkit.loss import summed_loss
from toolkit.parallel.gather import evaluation_model
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_LOG = 700.0
"""exp() of more does not fit into a float."""


def evaluate(
    config: EvalConfig, sharded: ShardedModel, data: EvaluationRows, predictions_path: Path, between_batches: Callable[[], None]
) -> dict[str, float]:
    """Evaluate on the held-out rows; every rank returns the same figures, but for its own clock's `rows_per_s`. Collective.

    Writes `predictions_path` (one JSON line a row, in row order) on rank 0 where `config.generate`.

    Args:
        between_batches: called by every rank equally often; may raise on all of them to end the evaluation.

    Returns:
        `loss` (nats a label token) and `loss/<name>` of each of `data.source_names` that has rows, `perplexity` (the
        exponential of `loss`), `bits_per_byte` (of the targets' utf-8 text),
        `token_accuracy` (percent of label tokens that were the likeliest); of generated texts `rouge1` … `rougeLsum` (percent,
        mean F), `exact_match` (percent equal to the reference but for white space around), `percent_distinct` (number of
        different predictions in percent of all predictions: 50 where every text comes twice); `num_rows`, `rows_per_s`.
    """
    start_s = time.perf_counter()
    batches = plan_evaluation(data, config.batch_size_rows, rank(), world_size())
    with random_state_kept(), torch.no_grad(), evaluation_model(sharded, config.unshard) as (model, in_step):
        figures = _evaluate_loss(model, sharded, data, batches, in_step, between_batches)
        if config.generate and data.prompted:
            scores = _generate(config, model, sharded, data, batches, in_step, between_batches)
            figures |= _gather_scores(scores, data, predictions_path)
    seconds = time.perf_counter() - start_s
    return {**figures, "num_rows": len(data.rows), "rows_per_s": len(data.rows) / seconds}


def _evaluate_loss(
    model: PreTrainedModel,
    sharded: ShardedModel,
    data: EvaluationRows,
    batches: list[list[int]],
    in_step: bool,
    between_batches: Callable[[], None],
) -> dict[str, float]:
    """Token-weighted loss over all ranks, and of each source. Collective."""
    names = data.source_names
    num_sources = max(1, len(names))
    loss_sums = torch.zeros(num_sources, dtype=torch.float64, device=sharded.accelerator.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=sharded.accelerator.device)
    num_tokens, num_bytes = torch.zeros(num_sources, dtype=torch.float64), 0
    for indices in batches:
        between_batches()
        if not indices and not in_step:
            continue
        # Without rows one whose labels do not count, to stay in step with the other ranks.
        rows = [[data.rows[i]] for i in indices or [0]]
        batch_sum, batch_correct = summed_loss(model, _on_device(data.collator.collate(rows, is_dummy=not indices), sharded))
        source = data.sources[(indices or [0])[0]]  # one of all rows of a batch
        loss_sums[source] += batch_sum
        num_correct += batch_correct
        num_tokens[source] += sum(row["num_label_tokens"] for (row,) in rows) if indices else 0
        num_bytes += sum(row["target_bytes"] for (row,) in rows) if indices else 0
    counts = torch.tensor([num_correct.item(), num_bytes], dtype=torch.float64)
    totals = reduce_on_cpu(torch.cat([loss_sums.cpu(), num_tokens, counts]), dist.ReduceOp.SUM)
    losses, tokens = totals[:-2].view(2, num_sources).tolist()
    total_correct, total_bytes = totals[-2:].tolist()
    total_loss, total_tokens = sum(losses), sum(tokens)
    loss = total_loss / total_tokens
    return {
        "loss": loss,
        **{f"loss/{name}": losses[i] / tokens[i] for i, name in enumerate(names) if tokens[i]},
        "perplexity": math.exp(min(loss, LONGEST_LOG)),
        "bits_per_byte": total_loss / math.log(2) / total_bytes if total_bytes else math.nan,  # rows of one token have none
        "token_accuracy": 100 * total_correct / total_tokens,
    }
