"""Held-out loss and generated summaries, over all ranks, each row exactly once.

The loss is a sum over label tokens divided by their number, so batch size, process count and padding do not show in it.
ROUGE is scored row by row on the rank that generated the row, and averaged in row order on rank 0.

Shapes: `B` rows, `S` source positions, `T` target positions, `V` vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from toolkit.config import EvalConfig
from toolkit.data.collate import Batch, collate
from toolkit.distributed import agreed, broadcast_object, gather_objects, rank, reduce_on_cpu, world_size
from toolkit.errors import UserError
from toolkit.losses import summed_cross_entropy
from toolkit.sharding import ShardedModel, evaluation_model, generation_ready

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROUGE_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
HIGHER_IS_BETTER = (*ROUGE_METRICS, "percent_distinct")


@dataclass(frozen=True)
class EvaluationRows:
    """Held-out rows and what reading them needs."""

    rows: Dataset
    """Columns as in `TokenizedRows`."""
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    decoder_start_token_id: int


@dataclass(frozen=True)
class Score:
    """One generated row; `index` is its place in the held-out rows."""

    index: int
    prediction: str
    rouge: tuple[float, ...]


def evaluate(config: EvalConfig, sharded: ShardedModel, data: EvaluationRows, predictions_path: Path) -> dict[str, float]:
    """Evaluate on the held-out rows; every rank returns the same figures, but for its own clock's `rows_per_s`. Collective.

    Writes `predictions_path` (one JSON line a row, in row order) on rank 0 where `config.generate`.

    Returns:
        `loss` (nats a label token), `bits_per_byte` (of the targets' utf-8 text), `rouge1` … `rougeLsum` (percent, mean F),
        `percent_distinct` (share of predictions that differ from all others), `num_rows`, `rows_per_s`.
    """
    start_s = time.perf_counter()
    batches = plan_evaluation(data.rows, config.batch_size_rows, rank(), world_size())
    with torch.no_grad(), evaluation_model(sharded, config.unshard) as (model, in_step):
        figures = _evaluate_loss(model, sharded, data, batches, in_step)
        if config.generate:
            scores = _generate(config, model, sharded, data, batches, in_step)
            figures |= _gather_scores(scores, data, predictions_path)
    seconds = time.perf_counter() - start_s
    return {**figures, "num_rows": len(data.rows), "rows_per_s": len(data.rows) / seconds}


def plan_evaluation(rows: Dataset, batch_size_rows: int, rank: int, world_size: int) -> list[list[int]]:
    """This rank's batches of row indices: sorted by length, longest first, dealt over the ranks batch by batch.

    Every rank gets the same number of batches; the missing ones are empty.
    """
    lengths = np.asarray(rows["source_length"][:]) * 1024 + np.asarray(rows["target_length"][:])
    order = np.argsort(-lengths, kind="stable").tolist()
    # A short list is cut finer, so that no rank is left without work.
    size = max(1, min(batch_size_rows, math.ceil(len(order) / world_size)))
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    batches += [[]] * (-len(batches) % world_size)
    return batches[rank::world_size]


def is_better(metric: str, new: float, old: float | None) -> bool:
    """Whether `new` gains on `old`, the best so far, if there is one; a NaN never does."""
    if old is None:
        return not math.isnan(new)
    return new > old if metric in HIGHER_IS_BETTER else new < old


def check_metric(config: EvalConfig) -> None:
    """Refuse a metric that no evaluation gives.

    Raises:
        UserError: naming those that exist.
    """
    known = ("loss", "bits_per_byte", *(HIGHER_IS_BETTER if config.generate else ()))
    if config.best_metric not in known:
        raise UserError(f"eval.best_metric is {config.best_metric}: choose one of {', '.join(known)}")


def _evaluate_loss(
    model: PreTrainedModel, sharded: ShardedModel, data: EvaluationRows, batches: list[list[int]], in_step: bool
) -> dict[str, float]:
    """Token-weighted loss over all ranks. Collective."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=sharded.accelerator.device)
    num_tokens = num_bytes = 0
    for indices in batches:
        if not indices and not in_step:
            continue
        batch = _load_batch(data, indices, sharded)
        labels_BT = batch.pop("labels")
        logits_BTV = model(**batch, use_cache=False).logits
        loss_sum += summed_cross_entropy(logits_BTV, labels_BT)
        num_tokens += sum(data.rows[i]["target_length"] for i in indices)
        num_bytes += sum(data.rows[i]["target_bytes"] for i in indices)
    totals = torch.tensor([loss_sum.item(), num_tokens, num_bytes], dtype=torch.float64)
    total_loss, total_tokens, total_bytes = reduce_on_cpu(totals, dist.ReduceOp.SUM).tolist()
    return {
        "loss": total_loss / total_tokens,
        "bits_per_byte": total_loss / math.log(2) / total_bytes,
    }


def _generate(
    config: EvalConfig,
    model: PreTrainedModel,
    sharded: ShardedModel,
    data: EvaluationRows,
    batches: list[list[int]],
    in_step: bool,
) -> list[Score]:
    """Summaries of this rank's rows, scored. Collective where `in_step`."""
    from toolkit.metrics.rouge import rouge_scores

    scores = []
    with generation_ready(sharded, model):
        for indices in batches:
            if not indices and not in_step:
                continue
            batch = _load_batch(data, indices, sharded)
            tokens_BT = model.generate(  # type: ignore[operator]
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=config.max_new_tokens,
                num_beams=config.num_beams,
                no_repeat_ngram_size=config.no_repeat_ngram_size,
                do_sample=False,
                use_cache=True,
                synced_gpus=in_step,
            )
            if not indices:
                continue
            predictions = data.tokenizer.batch_decode(tokens_BT, skip_special_tokens=True)
            per_row = rouge_scores(predictions, [data.rows[i]["target"] for i in indices])
            for place, (index, prediction) in enumerate(zip(indices, predictions, strict=True)):
                scores.append(Score(index, prediction, tuple(per_row[name][place] for name in ROUGE_METRICS)))
    return scores


def _gather_scores(scores: list[Score], data: EvaluationRows, predictions_path: Path) -> dict[str, float]:
    """Mean scores in row order, equal for every process count; rank 0 writes the predictions. Collective.

    Raises:
        UserError: the predictions cannot be written; on every rank.
    """
    gathered = gather_objects(scores)
    figures: dict[str, float] = {}
    ordered: list[Score] = []
    if rank() == 0:
        ordered = sorted((score for part in gathered for score in part), key=lambda score: score.index)
        if [score.index for score in ordered] != list(range(len(data.rows))):
            raise RuntimeError(f"{len(ordered)} scored rows for {len(data.rows)} held-out rows: a row is missing or doubled")
        for place, name in enumerate(ROUGE_METRICS):
            figures[name] = math.fsum(score.rouge[place] for score in ordered) / len(ordered)
        figures["percent_distinct"] = 100 * len({score.prediction for score in ordered}) / len(ordered)
    agreed(lambda: _write_predictions(ordered, data, predictions_path) if rank() == 0 else None)
    return broadcast_object(figures)


def _write_predictions(scores: list[Score], data: EvaluationRows, path: Path) -> None:
    lines = []
    for score in scores:
        row = data.rows[score.index]
        line = {"row_id": row["row_id"], "prediction": score.prediction, "reference": row["target"]}
        line |= {name: round(value, 4) for name, value in zip(ROUGE_METRICS, score.rouge, strict=True)}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the predictions {path} could not be written: {error.strerror}") from None


def _load_batch(data: EvaluationRows, indices: list[int], sharded: ShardedModel) -> Batch:
    """Rows as tensors on the device; without rows one whose labels do not count, to stay in step with the other ranks."""
    rows = [data.rows[i] for i in indices or [0]]
    batch = collate(rows, data.pad_token_id, data.decoder_start_token_id, counts=bool(indices))
    return {name: tensor.to(sharded.accelerator.device) for name, tensor in batch.items()}
