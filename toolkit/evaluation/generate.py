"""Generates texts for evaluation rows with a prompt, and scores them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import gather_objects, on_rank_0
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError
from toolkit.evaluation.metrics import compute_figures
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import save_json_lines
from toolkit.parallel.gather import generation_ready
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUGE_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Score:
    """The scored text of one row; `index` is the row's position in the evaluation split."""

    index: int
    prediction: str
    rouge: tuple[float, ...]


def generate_texts(
    config: EvalConfig,
    model: PreTrainedModel,
    sharded: ShardedModel,
    data: EvaluationRows,
    batches: list[list[int]],
    in_step: bool,
    between_batches: Callable[[], None],
) -> list[Score]:
    """Generate and score the texts of this rank's rows. Collective if `in_step`."""
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
            # In step, a rank without rows generates for any prompt, so that the collectives of all ranks match.
            prompts = move_to(
                sharded.accelerator.device, data.collator.prompts([data.rows[i] for i in indices or data.prompted[:1]])
            )
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


def gather_scores(scores: list[Score], data: EvaluationRows, predictions_path: Path) -> dict[str, float]:
    """Mean scores, equal for every process count because rank 0 sums in row order; it also writes the predictions. Collective.

    Raises:
        UserError: the predictions cannot be written, or one of `data.metrics` fails; on every rank.
    """
    gathered = gather_objects(scores)

    def score_rows() -> dict[str, float]:
        ordered = sorted((score for part in gathered for score in part), key=lambda score: score.index)
        if [score.index for score in ordered] != data.prompted:
            raise RuntimeError(f"{len(ordered)} scored rows for {len(data.prompted)} prompts: a row is missing or doubled")
        _write_predictions(ordered, data, predictions_path)  # first: they are there to look at where a metric fails
        return _mean_scores(ordered, data)

    return on_rank_0(score_rows)


def _mean_scores(ordered: list[Score], data: EvaluationRows) -> dict[str, float]:
    """ROUGE and the like, and the figures of `data.metrics`."""
    figures: dict[str, float] = {}
    for place, name in enumerate(ROUGE_METRICS):
        figures[name] = math.fsum(score.rouge[place] for score in ordered) / len(ordered)
    predictions, references = [score.prediction for score in ordered], data.references
    pairs = zip(predictions, references, strict=True)
    figures["exact_match"] = 100 * sum(ours.strip() == theirs.strip() for ours, theirs in pairs) / len(ordered)
    figures["percent_distinct"] = 100 * len(set(predictions)) / len(ordered)
    if data.metrics:
        working("computing eval.metrics")
    return figures | compute_figures(data.metrics, predictions, references)


def _write_predictions(scores: list[Score], data: EvaluationRows, path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for score in scores:
        row = data.rows[score.index]
        line = {"row_id": row["row_id"], "prediction": score.prediction, "reference": row["target"]}
        line |= {name: round(value, 4) for name, value in zip(ROUGE_METRICS, score.rouge, strict=True)}
        lines.append(line)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the run folder may have been removed
        save_json_lines(path, lines)
    except OSError as error:
        raise UserError(f"the predictions {path} could not be written: {error.strerror}") from None


def _stop_token_ids(model: PreTrainedModel, data: EvaluationRows) -> list[int] | None:
    """The tokens that end a text for the model or in the rows (such as the end of a chat turn). None leaves it to `generate`."""
    own = model.generation_config.eos_token_id  # type: ignore[union-attr]
    every = {*data.stop_token_ids, *(own if isinstance(own, list) else [own])} - {None}
    return sorted(every) or None
