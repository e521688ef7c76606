"""Generates texts for evaluation rows with a prompt, and scores them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import gather_objects, on_rank_0
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError
from toolkit.evaluation.metrics import compute_figures
from toolkit.evaluation.rouge import ROUGE_KEYS, mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import save_json_lines
from toolkit.parallel.gather import generation_ready
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN_FIGURES = ("loss", "bits_per_byte", "token_accuracy", "accuracy", *ROUGE_KEYS, "exact_match", "percent_distinct")
"""Figures of an evaluation that tables show, in order."""
BASELINE = "baseline"
"""Kind of the lines of `metrics.jsonl` with the figures of texts that need no model."""


@dataclass(frozen=True)
class Score:
    """The scored text of one row; `index` is the row's position in the evaluation split."""

    index: int
    prediction: str
    rouge: dict[str, float]


@contextlib.contextmanager
def encoder_output_kept(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Context whose forward leaves what its encoder returns in the dict, as `generate` takes it; empty for a causal model."""
    kept: dict[str, Any] = {}
    if not model.config.is_encoder_decoder:
        yield kept
        return
    encoder: Any = model.get_encoder()
    with encoder.register_forward_hook(lambda module, args, outputs: kept.update(encoder_outputs=outputs)):
        yield kept


def generate_texts(
    config: EvalConfig,
    model: PreTrainedModel,
    sharded: ShardedModel,
    data: EvaluationRows,
    batch: list[int],
    encoded: dict[str, Any],
    in_step: bool,
) -> list[Score]:
    """Generate and score the texts of a batch's rows with a prompt. Collective if `in_step`.

    Args:
        encoded: what `encoder_output_kept` has of the same rows.
    """
    indices = [i for i in batch if data.has_prompt[i]]
    if not indices and not in_step:
        return []
    # In step, a rank without rows generates for any prompt, so that the collectives of all ranks match.
    rows = [data.rows[i] for i in indices or data.prompted[:1]]
    prompts = move_to(sharded.accelerator.device, data.collator.prompts(rows))
    with generation_ready(sharded, model):
        tokens_BT = model.generate(  # type: ignore[operator]
            **prompts,
            **encoded,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=data.collator.pad_token_id,
            eos_token_id=_stop_token_ids(model, data),
            num_beams=config.num_beams,
            no_repeat_ngram_size=config.no_repeat_ngram_size,
            do_sample=False,
            use_cache=True,
            synced_gpus=in_step,
        )
    if not indices:
        return []
    predictions = data.tokenizer.batch_decode(data.collator.new_tokens(tokens_BT, prompts), skip_special_tokens=True)
    per_row = rouge_scores(predictions, [row["target"] for row in rows], data.rouge_tokenizer)
    return [Score(*scored) for scored in zip(indices, predictions, per_row, strict=True)]


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
    figures = mean_scores([score.rouge for score in ordered])
    predictions, references = [score.prediction for score in ordered], data.references
    pairs = zip(predictions, references, strict=True)
    figures["exact_match"] = 100 * sum(ours.strip() == theirs.strip() for ours, theirs in pairs) / len(ordered)
    figures["percent_distinct"] = 100 * len(set(predictions)) / len(ordered)
    if data.metrics:
        working("computing eval.metrics")
    return figures | compute_figures(data.metrics, predictions, references, data.prompted_ids)


def _write_predictions(scores: list[Score], data: EvaluationRows, path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for score in scores:
        row = data.rows[score.index]
        line = {"row_id": row["row_id"], "prediction": score.prediction, "reference": row["target"]}
        line |= {name: round(value, 4) for name, value in score.rouge.items()}
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
