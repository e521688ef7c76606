"""The reference of pairs: log-probabilities of all answers, computed once before the first step, and kept in the run folder.

Shapes: `R` rows, with the chosen answer before the rejected one where a 2 follows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.config.schema import AdapterConfig, ModelConfig
from toolkit.data.collate import Row, move_to
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.distributed.comm import gather_objects, on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.progress import Phase
from toolkit.distributed.rng import random_state_kept
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import give_usual_mode, written_beside
from toolkit.launch.accelerator import frozen_dtype
from toolkit.models.config import load_model_config
from toolkit.models.load import build_skeleton, num_token_embeddings
from toolkit.models.tensor_reader import hash_readers
from toolkit.models.weights import complete_readers, open_weights
from toolkit.objectives.preference_losses import WITHOUT_REFERENCE
from toolkit.parallel.gather import evaluation_model
from toolkit.parallel.wrap import shard_model

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset

    from toolkit.data.tokens.prepare import TokenizedRows
    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.parallel.wrap import ShardedModel

logger = logging.getLogger("toolkit")

REFERENCE_FILE = "reference.safetensors"


@dataclass(frozen=True)
class Reference:
    """The log-probabilities of known rows."""

    row_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(R,), in order."""
    logps_R2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.float32))

    def of_pairs(self, pairs: list[Row]) -> np.ndarray:
        """(number of pairs, 2) fp32; zeros where no row is known."""
        if not len(self.row_ids) or not pairs:
            return np.zeros((len(pairs), 2), dtype=np.float32)
        return self.logps_R2[self.row_ids.searchsorted([pair["row_id"] for pair in pairs])]


def know_reference(
    objective: Any,
    config: Any,
    sharded: ShardedModel,
    rows: TokenizedRows,
    evaluation: EvaluationRows,
    folder: Path,
    goes_on: bool,
) -> EvaluationRows:
    """`Objective.complete_evaluation` of `preference.Pairs`: the reference's log-probabilities, if the loss has one, in the
    collator. Those that the run folder keeps, else those of `preference.reference`, or of the model as it starts, dropout off.
    Collective."""
    if objective.settings.loss in WITHOUT_REFERENCE:
        return evaluation
    digest = hashlib.sha256(json.dumps([rows.fingerprint, evaluation.fingerprint]).encode()).hexdigest()
    path = folder / REFERENCE_FILE
    known = on_all_ranks(lambda: _read_reference(path, digest)) if goes_on else None
    if known is None:
        if goes_on and config.model.init_from and not config.preference.reference:
            what = f"{path} is missing or of other rows, and the reference, model.init_from {config.model.init_from}"
            raise UserError(f"{what}, is not loaded on a resume: put the file back, or begin a run with another run.name")
        if goes_on:
            logger.info(f"the reference is computed again: {path.name} is missing, damaged or of other rows")
        about = {"rows": digest}
        if config.preference.reference:  # beside the model, which has neither gradients nor moments yet
            sharded, about["weights"] = _load(config, objective, sharded.accelerator, rows)
        splits = {"training": rows.train, "evaluation": evaluation.rows}
        parts = [
            log_probabilities(objective, sharded, part, name, evaluation.collator, config.eval) for name, part in splits.items()
        ]
        ids, values_R2 = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(ids, kind="stable")
        known = Reference(ids[order], values_R2[order])
        on_rank_0(lambda: _write_reference(path, about, known))
    collator: Any = dataclasses.replace(evaluation.collator, reference=known)  # type: ignore[call-arg]
    return dataclasses.replace(evaluation, collator=collator)


def _load(config: Any, objective: Any, accelerator: Accelerator, rows: TokenizedRows) -> tuple[ShardedModel, str]:
    """The model of `preference.reference`, sharded as the trained one, in the dtype of frozen weights, and a hash of these.
    Collective."""
    name, options = str(config.preference.reference), config.model
    model = ModelConfig(
        name_or_path=name, trust_remote_code=options.trust_remote_code, attn_implementation=options.attn_implementation
    )
    enter_phase("loading the reference", counts_cpu=True)

    def prepare() -> tuple[Any, Any]:
        try:
            model_config = load_model_config(model, objective)
            skeleton = build_skeleton(model, model_config, objective)
            vocabulary = load_tokenizer(model, num_token_embeddings(skeleton)).get_vocab()
        except UserError as error:
            raise UserError(str(error).replace("model.name_or_path", "preference.reference")) from None
        if vocabulary != rows.tokenizer.get_vocab():
            what = f"preference.reference {name} has another tokenizer than {options.name_or_path}"
            raise UserError(f"{what}, so its log-probabilities would be of other tokens: give a model with the same one")
        return model_config, skeleton

    model_config, skeleton = on_all_ranks(prepare)
    dtype = frozen_dtype(accelerator, options.frozen_dtype, has_adapter=True)
    built, weights = open_weights(model, model_config, objective, skeleton, dtype)
    readers = complete_readers(built, weights, AdapterConfig(), model, seed=0)
    hashes = hash_readers(readers, dict.fromkeys(readers, dtype))
    return shard_model(accelerator, built, readers), hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


@torch.no_grad()
def log_probabilities(
    objective: Any, sharded: ShardedModel, rows: Dataset, name: str, collator: Any, config: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The row ids of all pairs, (R,), and the log-probabilities of their answers, R2 fp32. Collective.

    Which rows a batch takes does not depend on the number of ranks, so neither do the values, where each rank has the full model.
    """
    order = np.argsort(-rows.with_format("numpy")["num_tokens"][:], kind="stable") if len(rows) else np.zeros(0, dtype=np.int64)
    size = config.batch_size_rows
    batches = [order[first : first + size].tolist() for first in range(0, len(order), size)]
    batches += [[]] * (-len(batches) % world_size())
    found: list[tuple[list[int], np.ndarray]] = []
    doing = Phase(f"computing the reference of {name} pairs", len(rows), "pairs")
    with doing, random_state_kept(), evaluation_model(sharded, config.unshard) as (model, in_step):
        for indices in batches[rank() :: world_size()]:
            enter_phase("computing the reference")
            if not indices and not in_step:
                continue
            batch = collator.collate([[rows[i]] for i in indices or [0]], is_dummy=not indices)
            answers = objective.answers_of(model, move_to(sharded.accelerator.device, batch))
            if indices:
                found.append(([rows[i]["row_id"] for i in indices], answers.logps_P2.float().cpu().numpy()))
                doing.add(len(indices) * world_size())
    parts = [part for of_rank in gather_objects(found) for part in of_rank]
    ids = np.array([row_id for row_ids, _ in parts for row_id in row_ids], dtype=np.int64)
    return ids, np.concatenate([values for _, values in parts]) if parts else np.zeros((0, 2), dtype=np.float32)


def _read_reference(path: Path, digest: str) -> Reference | None:
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(path, "np") as file:
        if (file.metadata() or {}).get("rows") == digest:
            return Reference(file.get_tensor("row_id"), file.get_tensor("logps"))
    return None


def _write_reference(path: Path, about: dict[str, str], known: Reference) -> None:
    from safetensors.numpy import save_file

    with refusal_named(f"{path} cannot be written", "make room there"), written_beside(path) as beside:
        save_file({"row_id": known.row_ids, "logps": known.logps_R2}, beside, metadata=about)
        give_usual_mode(beside)
