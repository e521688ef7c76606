"""Generates texts for evaluation rows with a prompt, and scores them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import move_to
from toolkit.data.tokens.special_tokens import decode_texts
from toolkit.distributed.comm import gather_objects, on_rank_0
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import refusal_named
from toolkit.evaluation.metrics import compute_figures
from toolkit.evaluation.rouge import PIECE, ROUGE_KEYS, Tokenizer, mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import save_json_lines
from toolkit.models.generation import list_end_ids
from toolkit.parallel.gather import generation_ready
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN_FIGURES = ("loss", "bits_per_byte", "token_accuracy", "accuracy", *ROUGE_KEYS, "exact_match", "percent_distinct")
"""Figures of an evaluation that tables show, in order."""
BASELINE = "baseline"
"""Kind of the lines of `metrics.jsonl` with the figures of texts that need no model."""
FLAWS = {
    "num_at_max_new_tokens": "reached max_new_tokens (raise {}max_new_tokens)",
    "num_empty": "came out empty (train longer, or set fewer {}num_beams)",
    "num_repeating": "ended in a repetition ({}no_repeat_ngram_size 3 forbids it)",
}
"""Figures of generated texts, of `num_texts`: what so many of them did, and the setting that changes it."""
TIMES_REPEATED = 4
"""A phrase that ends a text so often in a row is a loop: none of 21,232 docstrings of Python, torch and transformers ends so."""


@dataclass(frozen=True)
class Score:
    """The scored text of one row; `index` is the row's position in the evaluation split."""

    index: int
    prediction: str
    rouge: dict[str, float]
    flaws: tuple[str, ...] = ()
    """Keys of `FLAWS`."""


@contextlib.contextmanager
def encoder_output_kept(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Context whose forward leaves what its encoder returns in the dict, as `generate` takes it."""
    kept: dict[str, Any] = {}
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
    """Generate and score the texts of a batch's rows with a prompt; `encoder_output_kept` gives `encoded`. Collective if
    `in_step`."""
    indices = [i for i in batch if data.rows[i].get("prompt_length") != 0]
    if not indices and not in_step:
        return []
    # In step, a rank without rows generates for any prompt, so that the collectives of all ranks match.
    rows, stop_token_ids = [data.rows[i] for i in indices or data.prompted[:1]], list_end_ids(model, data.stop_token_ids) or None
    prompts = move_to(sharded.accelerator.device, data.collator.prompts(rows))
    with generation_ready(sharded, model):
        tokens_BT = model.generate(  # type: ignore[operator]
            **prompts,
            **encoded,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=data.collator.pad_token_id,
            eos_token_id=stop_token_ids,
            num_beams=config.num_beams or 1,
            no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
            synced_gpus=in_step,
        )
    if not indices:
        return []
    new_tokens_BT = data.collator.new_tokens(tokens_BT, prompts)
    predictions = decode_texts(data.tokenizer, new_tokens_BT.tolist(), data.kept_tokens)
    flaws = find_flaws(model, new_tokens_BT, predictions, config.max_new_tokens, stop_token_ids)
    per_row = rouge_scores(predictions, [row["target"] for row in rows], data.rouge_tokenizer)
    return [Score(*scored) for scored in zip(indices, predictions, per_row, flaws, strict=True)]


def find_flaws(
    model: Any, new_tokens_BT: torch.Tensor, texts: list[str], max_new_tokens: int, eos_token_id: int | list[int] | None
) -> list[tuple[str, ...]]:
    """The keys of `FLAWS` that fit each text, of these tokens after the prompt."""
    # Some families (BART) force an end token onto the last place of a text that has none.
    num_own = max_new_tokens - (model.generation_config.forced_eos_token_id is not None)
    ends = torch.tensor([] if eos_token_id is None else eos_token_id, device=new_tokens_BT.device)
    has_end_B = torch.isin(new_tokens_BT[:, :num_own], ends).any(dim=1) | (new_tokens_BT.shape[1] < max_new_tokens)
    of_texts = zip(has_end_B.tolist(), texts, strict=True)
    return [tuple(compress(FLAWS, (not ended, not text.strip(), repeats_itself(text)))) for ended, text in of_texts]


def repeats_itself(text: str) -> bool:
    """Whether a text ends in a phrase `TIMES_REPEATED` times in a row: of 3 words or more, or of 2 that fill half of the text.

    A loop is hardly ever left, so the end shows it, as in Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    Its last word may be cut off. Signs between words count as a word; a phrase needs a letter, which rows of numbers lack.
    """
    words = PIECE.findall(text.lower())
    return any(
        words[end - (TIMES_REPEATED - 1) * size : end] == words[end - TIMES_REPEATED * size : end - size]
        and any(map(str.isalpha, "".join(words[end - size : end])))
        for end in (len(words), len(words) - 1)
        for size in range(2 if len(words) <= 4 * TIMES_REPEATED else 3, end // TIMES_REPEATED + 1)
    )


def describe_flaws(figures: Mapping[str, Any], section: str = "eval.") -> str:
    """How many texts have each kind of flaw, with the key of `section` that changes it; empty if none has one."""
    counted = [f"{figures[name]:,} {what.format(section)}" for name, what in FLAWS.items() if figures.get(name)]
    return f"of {figures['num_texts']:,} texts, {', '.join(counted)}" if counted else ""


def gather_scores(scores: list[Score], data: EvaluationRows, predictions_path: Path) -> dict[str, float]:
    """Mean scores, equal for every process count because rank 0 sums in row order; it also writes the predictions. If they cannot
    be written, or one of `data.metrics` fails, that is a `UserError` on every rank. Collective."""
    gathered = gather_objects(scores)

    def score_rows() -> dict[str, float]:
        ordered = sorted((score for part in gathered for score in part), key=lambda score: score.index)
        if [score.index for score in ordered] != data.prompted:
            raise RuntimeError(f"{len(ordered)} scored rows for {len(data.prompted)} prompts: a row is missing or doubled")
        _write_predictions(ordered, data, predictions_path)  # first: they are there to look at where a metric fails
        figures = _mean_scores(ordered, data)
        for name, rows in data.sets.items():
            of_set = [score for score in ordered if data.set_names[data.places[score.index]] == name]
            if of_set:
                figures |= {f"{name}/{key}": value for key, value in _mean_scores(of_set, rows, data.rouge_tokenizer).items()}
        flaws = {name: sum(name in score.flaws for score in ordered) for name in FLAWS}
        return {**figures, **flaws, "num_texts": len(ordered)}

    return on_rank_0(score_rows)


def _mean_scores(ordered: list[Score], data: EvaluationRows, scored_with: Tokenizer | None = None) -> dict[str, float]:
    """ROUGE and the like, and the figures of `data.metrics`. A set counts the words that it would count alone, so that its
    figures do not depend on other sets; `scored_with` is what the scores count, None for `data.rouge_tokenizer`."""
    predictions, references = [score.prediction for score in ordered], data.references
    per_row = [score.rouge for score in ordered]
    if scored_with not in (None, data.rouge_tokenizer):
        per_row = rouge_scores(predictions, references, data.rouge_tokenizer)
    figures = mean_scores(per_row)
    pairs = zip(predictions, references, strict=True)
    figures["exact_match"] = 100 * sum(ours.strip() == theirs.strip() for ours, theirs in pairs) / len(ordered)
    figures["percent_distinct"] = 100 * len(set(predictions)) / len(ordered)
    if data.metrics:
        enter_phase("computing eval.metrics", counts_cpu=True)
    row_ids = data.rows.select(data.prompted)["row_id"][:]
    return figures | compute_figures(data.metrics, predictions, references, row_ids)


def _write_predictions(scores: list[Score], data: EvaluationRows, path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for score in scores:
        row = data.rows[score.index]
        line = {"row_id": row["row_id"], "prediction": score.prediction, "reference": row["target"]}
        line |= {"set": name} if (name := data.set_names[data.places[score.index]]) else {}
        line |= {name: round(value, 4) for name, value in score.rouge.items()}
        lines.append(line)
    with refusal_named(f"the predictions {path} could not be written", "fix that, and start the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)  # the run folder may have been removed
        save_json_lines(path, lines)
