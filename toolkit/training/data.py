"""The data of a run: text → tokens on disk → the batch plan (which rows each step takes) and the evaluation split."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from toolkit.config.load import RecipeConfig
from toolkit.config.validate import check_evaluation_rows, check_num_steps, check_set_names
from toolkit.data.batch_plan import BatchPlan, Mix
from toolkit.data.collate import Collator, choose_multiples
from toolkit.data.tokens.prepare import TokenizedRows, prepare_rows
from toolkit.distributed.comm import rank
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.evaluation.metrics import OUR_FIGURES, TextMetric
from toolkit.evaluation.rows import EvaluationRows, choose_rows
from toolkit.launch.accelerator import bound_primitive_cache
from toolkit.models.generation import list_end_ids
from toolkit.models.load import num_token_embeddings
from toolkit.models.patches.recurrent import warn_of_short_rows
from toolkit.models.position_limits import check_positions, warn_of_shared_rope
from toolkit.objectives.objective import Objective
from toolkit.training.best_metric import check_metric_on_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("toolkit")

NUM_STEPS_LOOKED_AT = 100
"""Number of first steps whose distinct batch shapes are counted, to see how often shapes repeat."""


def prepare_data(
    objective: Objective,
    config: RecipeConfig,
    metrics: tuple[TextMetric, ...],
    model_config: PretrainedConfig,
    skeleton: PreTrainedModel,
    num_processes: int,
    *,
    pads: bool = False,
) -> tuple[TokenizedRows, BatchPlan, EvaluationRows]:
    """Tokenize the rows, plan the batches and choose the rows to evaluate, then check settings against them: what is wrong is a
    `UserError` on every rank. Collective.

    `preview` calls it too, for any number of processes. With `pads`, lengths are padded up to a grid.
    """
    # Text → tokens on disk.
    check_set_names(config.data, {*OUR_FIGURES, *(metric.name for metric in metrics)})
    rows = prepare_rows(objective, config.data, config.model, num_token_embeddings(skeleton), tuple(list_end_ids(skeleton)))

    # Which rows each step takes, and which rows are evaluated.
    columns, data = rows.train.with_format("numpy"), config.data
    weights = tuple(entry.weight for entry in data.mix)
    plan = BatchPlan(
        columns["num_tokens"][:],
        columns["num_label_tokens"][:],
        config.train,
        num_processes,
        bucket_by_length=not data.packing if data.bucket_by_length is None else data.bucket_by_length,
        pack_length_tokens=objective.num_documents * data.max_length_tokens if data.packing else None,
        mix=Mix(columns["source_index"][:], weights) if weights else None,
    )
    if config.packs and (warning := warn_of_short_rows(skeleton, float(plan.num_tokens.mean()))):
        logger.warning(warning)
    collator = objective.build_collator(skeleton, rows.tokenizer.pad_token_id)
    if config.has_own_objective:
        _check_batch(objective, collator, rows.train[0])
    held_out = EvaluationRows(
        rows.evaluation, rows.tokenizer, collator, objective, rows.stop_token_ids, rows.sets, metrics, rows.kept_tokens
    )
    evaluation = choose_rows(held_out, config.eval.num_rows)
    longest, shapes = _check_rows(config, model_config, rows, plan, evaluation)
    if pads and shapes:
        caps = tuple(max(plan.pack_length_tokens or 0, longest[side]) for side in objective.limits)
        multiples = choose_multiples([shape[: 1 + len(caps)] for shape in shapes], caps)
        padded: Any = dataclasses.replace(evaluation.collator, multiples=multiples, longest=caps)
        evaluation = dataclasses.replace(evaluation, collator=padded)
    return rows, plan, evaluation


def num_steps(config: RecipeConfig, plan: BatchPlan) -> int:
    """Optimizer updates of the run."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    assert config.train.num_epochs is not None  # ensured by load_config
    return plan.num_steps(config.train.num_epochs)


def _check_batch(objective: Objective, collator: Collator, row: dict[str, Any]) -> None:
    """Refuse an objective of the user's whose batches have other labels than their rows, or none for the loss that it has."""
    batch, num_labels = collator.collate([[row]]), row["num_label_tokens"]
    if len(batch.get("labels", ())) != num_labels:
        what = f"the collator of objective {objective.name} makes {len(batch.get('labels', ()))} labels"
        raise UserError(f"{what} of a row with {num_labels}: let its batch have labels, a vector of those of its rows")
    if type(objective).loss is Objective.loss and "label_positions" not in batch:
        what = f"objective {objective.name} has no loss of its own, and its batch no label_positions for cross-entropy"
        raise UserError(f"{what}: define loss")


def _check_rows(
    config: RecipeConfig, model_config: PretrainedConfig, rows: TokenizedRows, plan: BatchPlan, evaluation: EvaluationRows
) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Check settings against the rows, and print what there is to say about them. Returns the most tokens of each side of a row,
    and the shapes of the first micro-batches: rows, tokens (of an encoder-decoder: of sources) and labels."""
    # The model's positions: of the longest rows, and of all where a row changes those of others.
    objective, longest = evaluation.objective, dict[str, int]()
    for part in (rows.train, evaluation.rows):
        lengths = objective.side_lengths(part)
        if "prompt_length" in part.column_names:
            lengths["prompt"] = part.with_format("numpy")["prompt_length"][:]
        for side, values in lengths.items():
            longest[side] = max(longest.get(side, 0), int(values.max(initial=0)))
    if warning := warn_of_shared_rope(model_config, max(longest.values())):
        logger.warning(warning)
    check_positions(model_config, config.model.name_or_path, longest, config.eval)
    # Settings.
    enter_phase("planning the batches", counts_cpu=True)
    steps = num_steps(config, plan)
    check_num_steps(config, steps)
    check_evaluation_rows(config, len(evaluation.rows))
    check_metric_on_rows(config.eval, evaluation)
    num_first, of_sides = min(steps, NUM_STEPS_LOOKED_AT), tuple(objective.side_lengths(rows.train).values())
    both = of_sides if len(of_sides) > 1 else ((plan.num_tokens if config.packs else of_sides[0]), plan.num_label_tokens)
    shapes = [list(plan.shapes(both, num_first, of_rank, one_row=evaluation.collator.one_row)) for of_rank in (0, rank())]
    bound_primitive_cache(len(set(shapes[1])))
    for remark in rows.remarks:
        level = logging.WARNING if remark.startswith("WARNING: ") else logging.INFO
        logger.log(level, remark.removeprefix("WARNING: "))
    if smoothing := config.optim.label_smoothing:
        logger.info(f"the training loss has label smoothing {smoothing}, the evaluation's has none")
    if config.eval.generate and evaluation.prompted:
        logger.info(f"ROUGE counts {evaluation.rouge_tokenizer.description}")
    return longest, shapes[0]  # ranks choose one grid
