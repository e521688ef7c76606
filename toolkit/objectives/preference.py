"""Pairs of answers by a causal model: of two answers to a prompt, the chosen one is to become the likelier one.

A row is a pair: two documents, prompt and chosen answer, prompt and rejected answer. What it counts is the pair, so a step's loss
is divided by the pairs of the global batch. The losses are in `preference_losses.py`.

Shapes: `P` pairs, with the chosen answer before the rejected one where a 2 follows; `N` tokens of all answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from toolkit.config.schema import PreferenceLossConfig
from toolkit.data.collate import Batch, CausalCollator, Collator, Row, move_to
from toolkit.data.rows.columns import choose_preference_columns
from toolkit.data.rows.example import Example
from toolkit.data.tokens import causal
from toolkit.data.tokens.cuts import SIDES
from toolkit.distributed.comm import gather_objects, on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.rng import random_state_kept
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import give_usual_mode, written_beside
from toolkit.loss import IGNORED_LABEL
from toolkit.models.patches.chunked_loss import label_log_probabilities
from toolkit.models.patches.masks import attends_by_document
from toolkit.objectives.causal import Causal
from toolkit.objectives.model_checks import check_causal_model
from toolkit.objectives.preference_losses import LOSSES, SMOOTHED, WITHOUT_REFERENCE, Answers, difference
from toolkit.parallel.gather import evaluation_model

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.config.load import RecipeConfig
    from toolkit.data.tokens.prepare import TokenizedRows
    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.parallel.wrap import ShardedModel

REFERENCE_FILE = "reference.safetensors"


@dataclass(frozen=True)
class PairCollator(CausalCollator):
    """Rows are pairs: `input_ids` and `labels` of both documents, one after the other, and `num_chosen_tokens`."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "num_chosen_tokens", "row_id")
    reference_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False, compare=False)
    """The rows whose reference log-probabilities are known, in order; (R,)."""
    reference_R2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.float32), repr=False, compare=False)

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """As `CausalCollator.collate`, of both documents of each pair: two rows of the tensors, or neighbours in a pack.

        Returns:
            Also `answer_tokens` N, the tokens at `label_positions`; `answer_lengths`, a list of 2P counts of them; and `labels`,
            what counts: the pairs, by the reference's log-probabilities P2 fp32, zeros where they are not known.
        """
        pairs = [pair for pack in packs for pair in pack]
        documents = [[document for pair in pack for document in split_pair(pair)] for pack in packs]
        if not self.one_row and len(pairs) == len(packs):
            documents = [[document] for pack in documents for document in pack]
        batch = super().collate(documents, is_dummy=is_dummy)
        counted = [] if is_dummy else [document["labels"] for pack in documents for document in pack]
        batch["answer_tokens"] = batch["labels"]
        batch["answer_lengths"] = [int(np.count_nonzero(np.asarray(labels) != IGNORED_LABEL)) for labels in counted]
        known_P2 = np.zeros((0 if is_dummy else len(pairs), 2), dtype=np.float32)
        if len(self.reference_ids) and len(known_P2):
            places = self.reference_ids.searchsorted([pair["row_id"] for pair in pairs])
            known_P2 = self.reference_R2[places]
        batch["labels"] = torch.from_numpy(known_P2)
        return batch


def split_pair(pair: Row) -> list[Row]:
    """The two documents of a pair, as rows of a causal model."""
    place = pair["num_chosen_tokens"]
    return [
        {"input_ids": pair["input_ids"][part], "labels": pair["labels"][part]} for part in (slice(0, place), slice(place, None))
    ]


class Preference(Causal):
    """The better of two answers."""

    name = "preference"
    kind = "a causal model, of pairs of answers"
    counts_tokens = False
    num_second_sums = 6
    counted = "pair"
    num_documents = 2
    default_dropout = 0.0

    choose_columns = staticmethod(choose_preference_columns)

    def __init__(self, config: RecipeConfig | None = None) -> None:
        self.settings: PreferenceLossConfig = getattr(config, "preference", PreferenceLossConfig())
        name, share = self.settings.loss, self.settings.label_smoothing
        if name not in LOSSES:
            raise UserError(f"preference.loss is {name}: choose one of {', '.join(LOSSES)}")
        if share and name not in SMOOTHED:
            raise UserError(f"preference.label_smoothing is {share}, but {name} has none: leave it out")
        if share >= 0.5:
            raise UserError(f"preference.label_smoothing is {share}, so most pairs would be wrong: give less than 0.5")
        if config is not None and config.optim.label_smoothing:
            raise UserError("optim.label_smoothing is that of cross-entropy over tokens: set preference.label_smoothing")
        if config is not None and config.optim.router_aux_loss != "off":
            raise UserError("optim.router_aux_loss knows no pairs, whose answers are documents of their own: leave it out")

    # --- From the columns of a row to features.

    def tokenize(  # type: ignore[override]
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """As `causal.tokenize`, of both answers: their tokens one after the other, and what else holds for both."""
        is_chat = [messages is not None for messages in rows["messages"]]
        others = {
            "completion": [None if chat else text for chat, text in zip(is_chat, rows["rejected"], strict=True)],
            "messages": [text if chat else None for chat, text in zip(is_chat, rows["rejected"], strict=True)],
        }
        chosen, rejected = (causal.tokenize(answers, tokenizer, config, origins) for answers in (rows, rows | others))
        both = {name: list(zip(values, rejected[name], strict=True)) for name, values in chosen.items()}
        ids, lost = both["input_ids"], both["num_label_tokens"]
        return chosen | {
            **{name: [np.concatenate(pair) for pair in both[name]] for name in ("input_ids", "labels")},
            **{name: [sum(pair) for pair in both[name]] for name in ("num_tokens", "num_given_tokens", "num_lost_tokens")},
            "num_label_tokens": [int(all(counts) and not np.array_equal(*pair)) for counts, pair in zip(lost, ids, strict=True)],
            "num_chosen_tokens": [len(first) for first, _ in ids],
            "num_document_tokens": [max(map(len, pair)) for pair in ids],
            "odd": [first or second for first, second in both["odd"]],
            "held": ["\0".join(filter(None, pair)) for pair in both["held"]],
            "is_endless": [first or second for first, second in both["is_endless"]],
            "omitted": [", ".join(filter(None, dict.fromkeys(pair))) for pair in both["omitted"]],
            "stop_token_ids": [sorted({*first, *second}) for first, second in both["stop_token_ids"]],
        }

    def report(  # type: ignore[override]
        self, tokenized: Dataset, config: Any, name: str, origins: list[tuple[str, int]]
    ) -> tuple[Dataset, list[str], set[int]]:
        counts = tokenized.with_format("numpy")["num_label_tokens"][:]
        sentences, num_bad = [], int((counts == 0).sum())
        if num_bad:
            first = causal.locate(int(tokenized[int(np.flatnonzero(counts == 0)[0])]["row_id"]), origins)
            what = f"{num_bad} of {len(counts)} {SIDES[name]} pairs (first: {first})"
            limit = f"data.max_length_tokens = {config.max_length_tokens}"
            if num_bad == len(counts) and name == "train":
                raise UserError(f"{what} have equal answers, or one of which nothing is left, after the cut to {limit}: raise it")
            sentences = [f"left out {what}: within {limit}, one answer has nothing left, or both are equal"]
            tokenized = tokenized.select(np.flatnonzero(counts))
        kept, more, stops = causal.report(tokenized, config, name, origins)
        return kept, sentences + more, stops

    # --- From features to the loss.

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        return PairCollator(pad_token_id, one_row=attends_by_document(model))

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        labels = [token] * num_tokens
        half = max(1, num_tokens // 2)
        labels[0] = labels[half % num_tokens] = IGNORED_LABEL
        return {"input_ids": [token] * num_tokens, "labels": labels, "num_chosen_tokens": half, "row_id": 0}

    def loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss summed over pairs; and the sums of `metrics`, (6,)."""
        answers = answers_of(model, batch)
        if not len(answers.logps_P2):  # a dummy, whose graph must have every parameter
            return answers.logps_P2.sum(), answers.logps_P2.new_zeros(6)
        losses_P = LOSSES[self.settings.loss](answers, self.settings)
        with torch.no_grad():
            is_alone = self.settings.loss in WITHOUT_REFERENCE
            logps_P2 = answers.means_P2 if is_alone else answers.logps_P2
            rewards_P2 = self.settings.beta * (logps_P2 if is_alone else answers.ratios_P2)
            margins_P = difference(rewards_P2)
            sums = [rewards_P2.sum(0), torch.stack([(margins_P > 0).sum(), margins_P.sum()]), logps_P2.sum(0)]
        return losses_P.sum(), torch.cat(sums)

    def metrics(self, loss_sum: float, second_sums: Any, num_labels: float, num_bytes: float, /) -> dict[str, float]:  # type: ignore[override]
        """By TRL's names, means over pairs; `rewards/accuracies` is the share of pairs whose chosen answer has the higher
        reward."""
        means = np.broadcast_to(second_sums, len(FIGURES)) / num_labels
        return {"loss": loss_sum / num_labels} | dict(zip(FIGURES, means.tolist(), strict=True))

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        plain = CausalCollator(collator.pad_token_id, one_row=collator.one_row)
        check_causal_model(sharded, plain, packing=config.packs)

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        is_chat = example.messages is not None
        other: Any = {"messages": example.rejected} if is_chat else {"completion": example.rejected}
        answers = example, dataclasses.replace(example, **other)
        chosen, rejected = (super(Preference, self).show_texts(answer, tokenizer, config, where)["row"] for answer in answers)
        return {"row": f"chosen:\n{chosen}\nrejected:\n{rejected}"}

    # --- The reference.

    def complete_evaluation(
        self,
        config: RecipeConfig,
        sharded: ShardedModel,
        rows: TokenizedRows,
        evaluation: EvaluationRows,
        folder: Path,
        goes_on: bool,
    ) -> EvaluationRows:
        """Put the reference's log-probabilities into the collator: those that the run folder keeps, else those of the model as it
        starts, its dropout off."""
        if self.settings.loss in WITHOUT_REFERENCE:
            return evaluation
        digest = hashlib.sha256(json.dumps([rows.fingerprint, evaluation.fingerprint]).encode()).hexdigest()
        path = folder / REFERENCE_FILE
        known = on_all_ranks(lambda: _read_reference(path, digest)) if goes_on else None
        if known is None:
            if goes_on and config.model.init_from:
                raise UserError(
                    f"{path} is missing or of other rows, and the reference, model.init_from {config.model.init_from}, is not "
                    "loaded on a resume: put the file back, or begin a run with another run.name"
                )
            parts = [log_probabilities(sharded, part, evaluation.collator, config.eval) for part in (rows.train, evaluation.rows)]
            ids, values_R2 = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            order = np.argsort(ids, kind="stable")
            known = ids[order], values_R2[order]
            on_rank_0(lambda: _write_reference(path, digest, *known))
        ids, values_R2 = known
        collator: Any = dataclasses.replace(evaluation.collator, reference_ids=ids, reference_R2=values_R2)  # type: ignore[call-arg]
        return dataclasses.replace(evaluation, collator=collator)


FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")


def answers_of(model: nn.Module, batch: Batch) -> Answers:
    """The log-probabilities of a `PairCollator`'s batch, on the device. Collective under FSDP."""
    lengths, reference_P2 = batch["answer_lengths"], batch["labels"]
    inputs = {name: value for name, value in batch.items() if name not in ("answer_lengths", "answer_tokens", "labels")}
    logps_N = label_log_probabilities(model, {**inputs, "labels": batch["answer_tokens"]})
    if not lengths:
        return Answers(logps_N.sum() * reference_P2, reference_P2, reference_P2)
    # Sums of slices, because adding by an index has no fixed order on a GPU.
    logps_P2 = torch.stack([part.sum() for part in logps_N.split(lengths)]).view(-1, 2)
    return Answers(logps_P2, reference_P2, torch.tensor(lengths, dtype=torch.float32).to(logps_P2.device).view(-1, 2))


@torch.no_grad()
def log_probabilities(sharded: ShardedModel, rows: Dataset, collator: Any, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """The row ids of all pairs, (R,), and the log-probabilities of their answers, R2 fp32. Collective.

    Which rows a batch takes does not depend on the number of ranks, so neither do the values, where each rank has the full model.
    """
    order = np.argsort(-rows.with_format("numpy")["num_tokens"][:], kind="stable") if len(rows) else np.zeros(0, dtype=np.int64)
    size = config.batch_size_rows
    batches = [order[first : first + size].tolist() for first in range(0, len(order), size)]
    batches += [[]] * (-len(batches) % world_size())
    found: list[tuple[list[int], np.ndarray]] = []
    with random_state_kept(), evaluation_model(sharded, config.unshard) as (model, in_step):
        for indices in batches[rank() :: world_size()]:
            enter_phase("computing the reference")
            if not indices and not in_step:
                continue
            batch = collator.collate([[rows[i]] for i in indices or [0]], is_dummy=not indices)
            answers = answers_of(model, move_to(sharded.accelerator.device, batch))
            if indices:
                found.append(([rows[i]["row_id"] for i in indices], answers.logps_P2.float().cpu().numpy()))
    parts = [part for of_rank in gather_objects(found) for part in of_rank]
    ids = np.array([row_id for row_ids, _ in parts for row_id in row_ids], dtype=np.int64)
    return ids, np.concatenate([values for _, values in parts]) if parts else np.zeros((0, 2), dtype=np.float32)


def _read_reference(path: Path, digest: str) -> tuple[np.ndarray, np.ndarray] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            if (file.metadata() or {}).get("rows") == digest:
                return file.get_tensor("row_id"), file.get_tensor("logps")
    except (OSError, SafetensorError):
        pass
    return None


def _write_reference(path: Path, digest: str, ids: np.ndarray, values_R2: np.ndarray) -> None:
    from safetensors.numpy import save_file

    with refusal_named(f"{path} cannot be written", "make room there"), written_beside(path) as beside:
        save_file({"row_id": ids, "logps": values_R2}, beside, metadata={"rows": digest})
        give_usual_mode(beside)
