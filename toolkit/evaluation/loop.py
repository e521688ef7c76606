"""Evaluation loss and generated texts over all ranks; each row of the evaluation split counts exactly once.

An encoder-decoder encodes each batch once, for its loss and its texts.
The loss is a sum over label tokens divided by their number, so it does not depend on batch size, process count or padding.
ROUGE is scored per row on the rank that generated the text, and averaged in row order on rank 0.

Shapes: `B` rows, `S` source positions, `T` target positions, `V` vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import rank, reduce_on_cpu, world_size
from toolkit.distributed.rng import random_state_kept
from toolkit.evaluation.generate import gather_scores, generate_texts
from toolkit.evaluation.rows import EvaluationRows, plan_evaluation
from toolkit.models.position_limits import list_shared_ropes
from toolkit.parallel.gather import evaluation_model
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evaluate(
    config: EvalConfig, sharded: ShardedModel, data: EvaluationRows, predictions_path: Path, between_batches: Callable[[], None]
) -> dict[str, float]:
    """Evaluate on the evaluation split. Every rank returns the same figures, except `rows_per_s` by its own clock. Collective.

    With `config.generate`, rank 0 writes `predictions_path` (one JSON line per row, in row order). Every rank calls
    `between_batches` equally often; it may raise on all of them to end the evaluation.

    Returns:
        `loss` (nats per label token), `perplexity` (the exponential of `loss`), `bits_per_byte` (of the targets' utf-8 text),
        `token_accuracy` (percent of label tokens that the model ranks first); for generated texts `rouge1` … `rougeLsum`
        (percent, mean F), `exact_match` (percent equal to the reference, ignoring white space around it), `percent_distinct`
        (distinct predictions in percent of all predictions: 50 if every text occurs twice), and the figures of `data.metrics`;
        all of these for each of `data.sets` too, as `<name>/loss`; `num_texts` and those of `FLAWS`; `num_rows`, `rows_per_s`.
    """
    start_s = time.perf_counter()
    generates = config.generate and bool(data.prompted)
    ropes, new = list_shared_ropes(sharded.skeleton.config), config.max_new_tokens * generates
    batches = plan_evaluation(data, config.batch_size_rows, rank(), world_size(), ropes, new)
    sums, scores = _LossSums(data, sharded.accelerator.device), []
    with random_state_kept(), torch.no_grad(), evaluation_model(sharded, config.unshard) as (model, in_step):
        for indices in batches:
            between_batches()
            if not indices and not in_step:
                continue
            # A rank without rows runs one that does not count, so that the collectives of all ranks match.
            with data.objective.forward_kept(model) as encoded:
                sums.add(model, indices)
            if generates:
                scores += generate_texts(config, model, sharded, data, indices, encoded, in_step)
        figures = sums.figures()
        if generates:
            figures |= gather_scores(scores, data, predictions_path)
    seconds = time.perf_counter() - start_s
    return {**figures, "num_rows": len(data.rows), "rows_per_s": len(data.rows) / seconds}


class _LossSums:
    """The objective's sums, labels and bytes of this rank's batches by set, on the device, without a host read per batch."""

    def __init__(self, data: EvaluationRows, device: torch.device) -> None:
        self.data, self.device = data, device
        self.sums = torch.zeros(len(data.set_names), 3 + data.objective.num_second_sums, dtype=torch.float64, device=device)

    def add(self, model: PreTrainedModel, indices: list[int]) -> None:
        """The batch of these rows; of none, a forward pass whose labels do not count. Collective under FSDP."""
        rows = [self.data.rows[i] for i in indices or [0]]
        batch = self.data.collator.collate([[row] for row in rows], is_dummy=not indices)
        set_totals = self.sums[self.data.places[(indices or [0])[0]]]  # all rows of a batch have the same set
        loss_sum, second_sums = self.data.objective.loss(model, move_to(self.device, batch))
        set_totals[0] += loss_sum
        set_totals[1:-2] += second_sums
        if indices:
            set_totals[-2] += sum(row["num_label_tokens"] for row in rows)
            set_totals[-1] += sum(row["target_bytes"] for row in rows)

    def figures(self) -> dict[str, float]:
        """Token-weighted over all ranks, of all rows and of each set. Collective."""
        totals = reduce_on_cpu(self.sums.to("cpu", copy=True), dist.ReduceOp.SUM)  # of all ranks, in one collective

        def named(sums: list[float]) -> dict[str, float]:
            loss_sum, *second_sums, num_labels, num_bytes = sums
            second: Any = second_sums if len(second_sums) > 1 else second_sums[0]
            return self.data.objective.metrics(loss_sum, second, num_labels, num_bytes)

        figures = named(totals.sum(0).tolist())
        for name, set_totals in zip(self.data.set_names, totals.tolist(), strict=True):
            if name in self.data.sets:
                figures |= {f"{name}/{key}": value for key, value in named(set_totals).items()}
        return figures


def text_figures(loss_sum: float, num_correct: float, num_labels: float, num_bytes: float) -> dict[str, float]:
    """The figures of summed loss, correct tokens, label tokens and bytes."""
    return figures_of(loss_sum, num_labels, num_bytes) | {"token_accuracy": 100 * num_correct / num_labels}


def figures_of(total_loss: float, total_tokens: float, total_bytes: float) -> dict[str, float]:
    """`loss`, `perplexity` and `bits_per_byte` of a loss summed over label tokens, whose text has so many bytes."""
    loss = total_loss / total_tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # a float has no more
        # rows of one token have no label bytes
        "bits_per_byte": total_loss / math.log(2) / total_bytes if total_bytes else math.nan,
    }
