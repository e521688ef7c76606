"""Held-out loss and generated texts, over all ranks, each row exactly once.

The loss is a sum over label tokens divided by their number, so batch size, process count and padding do not show in it.
ROUGE is scored row by row on the rank that generated the row, and averaged in row order on rank 0.

Shapes: `B` rows, `S` source positions, `T` target positions, `V` vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.checkpoint.ranking import Goal
from toolkit.config.schema import EvalConfig
from toolkit.data.collate import Batch
from toolkit.distributed.comm import agreed, broadcast_object, gather_objects, rank, reduce_on_cpu, world_size
from toolkit.distributed.rng import random_state_kept
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows, plan_evaluation
from toolkit.files.json_lines import save_json_lines
from toolkit.loss import summed_loss
from toolkit.parallel.wrap import ShardedModel, evaluation_model, generation_ready

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUGE_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TEXT_METRICS = (*ROUGE_METRICS, "exact_match", "percent_distinct")
LOSS_METRICS = ("loss", "perplexity", "bits_per_byte", "token_accuracy")
HIGHER_IS_BETTER = (*TEXT_METRICS, "token_accuracy")
LONGEST_LOG = 700.0
"""exp() of more does not fit into a float."""


@dataclass(frozen=True)
class Score:
    """One generated row; `index` is its place in the held-out rows."""

    index: int
    prediction: str
    rouge: tuple[float, ...]


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


def build_goal(config: EvalConfig, data: EvaluationRows) -> Goal:
    """What `eval.best_metric` is of, and what it depends on: figures of texts also on how they are generated."""
    metric = config.best_metric
    keys = ("max_new_tokens", "num_beams", "no_repeat_ngram_size") if config.generate else ()
    measured_on = {"rows": data.fingerprint, **{key: getattr(config, key) for key in keys}}
    return Goal(metric, metric in HIGHER_IS_BETTER, measured_on, tuple(measured_on) if metric in TEXT_METRICS else ("rows",))


def check_metric(config: EvalConfig, data: EvaluationRows | None = None) -> None:
    """Refuse a metric that no evaluation gives, or, with `data`, none on these rows.

    Raises:
        UserError: naming those that exist.
    """
    known = (*LOSS_METRICS, *(TEXT_METRICS if config.generate else ()))
    if data is not None and config.best_metric in TEXT_METRICS and not data.prompted:
        raise UserError(f"eval.best_metric is {config.best_metric}, but no held-out row has a prompt: choose loss or the like")
    if config.best_metric not in known:
        raise UserError(f"eval.best_metric is {config.best_metric}: choose one of {', '.join(known)}")


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
        batch_sum, batch_correct = summed_loss(model, _on_device(data.collator.collate(rows, counts=bool(indices)), sharded))
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


def _generate(
    config: EvalConfig,
    model: PreTrainedModel,
    sharded: ShardedModel,
    data: EvaluationRows,
    batches: list[list[int]],
    in_step: bool,
    between_batches: Callable[[], None],
) -> list[Score]:
    """Texts of this rank's rows, scored. Collective where `in_step`."""
    from toolkit.evaluation.rouge import rouge_scores

    scores = []
    prompted = set(data.prompted)
    stop_token_ids = _stop_token_ids(model, data)
    with generation_ready(sharded, model):
        for batch_indices in batches:
            between_batches()
            indices = [i for i in batch_indices if i in prompted]
            if not indices and not in_step:
                continue
            prompts = _on_device(data.collator.prompts([data.rows[i] for i in indices or data.prompted[:1]]), sharded)
            tokens_BT = model.generate(  # type: ignore[operator]
                **prompts,
                max_new_tokens=config.max_new_tokens,
                pad_token_id=data.collator.pad_token_id,
                eos_token_id=stop_token_ids,
                num_beams=config.num_beams,
                no_repeat_ngram_size=config.no_repeat_ngram_size,
                do_sample=False,
                use_cache=True,
                synced_gpus=in_step,
            )
            if not indices:
                continue
            predictions = data.tokenizer.batch_decode(data.collator.new_tokens(tokens_BT, prompts), skip_special_tokens=True)
            per_row = rouge_scores(predictions, [data.rows[i]["target"] for i in indices], data.rouge_tokenizer)
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
        if [score.index for score in ordered] != data.prompted:
            raise RuntimeError(f"{len(ordered)} scored rows for {len(data.prompted)} prompts: a row is missing or doubled")
        for place, name in enumerate(ROUGE_METRICS):
            figures[name] = math.fsum(score.rouge[place] for score in ordered) / len(ordered)
        references = data.rows["target"][:]
        figures["exact_match"] = 100 * sum(s.prediction.strip() == references[s.index].strip() for s in ordered) / len(ordered)
        figures["percent_distinct"] = 100 * len({score.prediction for score in ordered}) / len(ordered)
    agreed(lambda: _write_predictions(ordered, data, predictions_path) if rank() == 0 else None)
    return broadcast_object(figures)


def _write_predictions(scores: list[Score], data: EvaluationRows, path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for score in scores:
        row = data.rows[score.index]
        line = {"row_id": row["row_id"], "prediction": score.prediction, "reference": row["target"]}
        line |= {name: round(value, 4) for name, value in zip(ROUGE_METRICS, score.rouge, strict=True)}
        lines.append(line)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the run folder, should it be gone
        save_json_lines(path, lines)
    except OSError as error:
        raise UserError(f"the predictions {path} could not be written: {error.strerror}") from None


def _stop_token_ids(model: PreTrainedModel, data: EvaluationRows) -> list[int] | None:
    """What ends a text: for the model, and as the rows end it (a chat model's turn, say). None leaves it to `generate`."""
    own = model.generation_config.eos_token_id  # type: ignore[union-attr]
    every = {*data.stop_token_ids, *(own if isinstance(own, list) else [own])} - {None}
    return sorted(every) or None


def _on_device(batch: Batch, sharded: ShardedModel) -> Batch:
    return {name: tensor.to(sharded.accelerator.device) for name, tensor in batch.items()}
