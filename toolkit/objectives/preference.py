"""Pairs of answers: of two answers to a prompt, the chosen one is to become the likelier one. `Pairs` is what causal models and
encoder-decoders share (`preference_seq2seq.py`); `Preference` is a causal model's.

A row is a pair: two documents, prompt and chosen answer, prompt and rejected answer. What it counts is the pair, so a step's loss
is divided by the pairs of the global batch. The losses are in `preference_losses.py`.

Shapes: `P` pairs, with the chosen answer before the rejected one where a 2 follows; `N` tokens of all answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from toolkit.config.schema import ModelConfig, PreferenceLossConfig
from toolkit.data.collate import Batch, CausalCollator, Collator, Row
from toolkit.data.rows.columns import choose_preference_columns
from toolkit.data.rows.example import Example
from toolkit.data.tokens import causal
from toolkit.data.tokens.cuts import SIDES
from toolkit.errors import UserError
from toolkit.loss import IGNORED_LABEL
from toolkit.models.patches.chunked_loss import label_log_probabilities
from toolkit.models.patches.masks import attends_by_document
from toolkit.objectives.causal import Causal
from toolkit.objectives.model_checks import check_causal_model
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference_losses import LOSSES, SMOOTHED, WITHOUT_REFERENCE, Answers, difference
from toolkit.objectives.reference import Reference, know_reference

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.config.load import RecipeConfig
    from toolkit.data.tokens.prepare import TokenizedRows
    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.parallel.wrap import ShardedModel

FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")


@dataclass(frozen=True)
class PairCollator(CausalCollator):
    """Rows are pairs: `input_ids` and `labels` of both documents, one after the other, and `num_chosen_tokens`."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "num_chosen_tokens", "row_id")
    reference: Reference = field(default_factory=Reference, repr=False, compare=False)

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """As `CausalCollator.collate`, of both documents of each pair: two rows of the tensors, or neighbours in a pack.

        Returns:
            Also what `of_answers` adds.
        """
        pairs = [pair for pack in packs for pair in pack]
        documents = [[document for pair in pack for document in split_pair(pair)] for pack in packs]
        if not self.one_row and len(pairs) == len(packs):
            documents = [[document] for pack in documents for document in pack]
        batch = super().collate(documents, is_dummy=is_dummy)
        return of_answers(batch, [] if is_dummy else pairs, self.reference)


def of_answers(batch: Batch, pairs: list[Row], reference: Reference) -> Batch:
    """The batch of both answers of each pair (none in a dummy), with `answer_tokens` N, the tokens at `label_positions`;
    `answer_lengths`, a list of 2P counts of them; and `labels`, what counts: the pairs, by the reference's log-probabilities P2
    fp32, zeros where they are not known."""
    answers = [part for pair in pairs for part in split(pair["labels"], pair)]
    lengths = [int(np.count_nonzero(np.asarray(labels) != IGNORED_LABEL)) for labels in answers]
    known = {"labels": torch.from_numpy(reference.of_pairs(pairs)), "answer_lengths": lengths}
    return {**batch, "answer_tokens": batch["labels"], **known}


def split(values: Any, pair: Row) -> tuple[Any, Any]:
    """The chosen and the rejected answer's part of what a pair has for both."""
    place = pair["num_chosen_tokens"]
    return values[:place], values[place:]


def split_pair(pair: Row) -> list[Row]:
    """The two documents of a pair, as rows of a causal model."""
    ids, labels = (split(pair[name], pair) for name in ("input_ids", "labels"))
    return [{"input_ids": ids[place], "labels": labels[place]} for place in (0, 1)]


class Pairs(Objective):
    """What the objectives of pairs share; the other base of each is that of its answers."""

    num_second_sums = 6
    logs_metrics = True
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
        if self.settings.reference and name in WITHOUT_REFERENCE:
            raise UserError(f"preference.reference is {self.settings.reference}, but {name} has none: leave it out")
        if share >= 0.5:
            raise UserError(f"preference.label_smoothing is {share}, so most pairs would be wrong: give less than 0.5")
        if config is not None and config.optim.label_smoothing:
            raise UserError("optim.label_smoothing is that of cross-entropy over tokens: set preference.label_smoothing")
        if config is not None and config.optim.router_aux_loss != "off":
            raise UserError("optim.router_aux_loss knows no pairs, whose answers are documents of their own: leave it out")

    def list_settings(self, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        return super().list_settings(config, tokenizer) | {"pairs": 2}  # of these columns

    def report(
        self, tokenized: Dataset, config: Any, name: str, origins: list[tuple[str, int]]
    ) -> tuple[Dataset, list[str], set[int]]:
        """As of its answers; pairs without a preference after the cut are left out."""
        counts = tokenized.with_format("numpy")["num_label_tokens"][:]
        sentences, num_bad = [], int((counts == 0).sum())
        if num_bad:
            first = causal.locate(int(tokenized[int(np.flatnonzero(counts == 0)[0])]["row_id"]), origins)
            what = f"{num_bad} of {len(counts)} {SIDES[name]} pairs (first: {first})"
            side = [*self.limits.values()][-1]
            limit = f"data.{side} = {getattr(config, side)}"
            if num_bad == len(counts) and name == "train":
                raise UserError(f"{what} have equal answers, or one of which nothing is left, after the cut to {limit}: raise it")
            sentences = [f"left out {what}: within {limit}, one answer has nothing left, or both are equal"]
            tokenized = tokenized.select(np.flatnonzero(counts))
        kept, more, stops = super().report(tokenized, config, name, origins)
        return kept, sentences + more, stops

    def loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss summed over pairs; and the sums of `metrics`, (6,)."""
        answers = self.answers_of(model, batch)
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

    def answers_of(self, model: nn.Module, batch: Batch) -> Answers:
        """The log-probabilities of a batch of `of_answers`, on the device. Collective under FSDP."""
        lengths, reference_P2 = batch["answer_lengths"], batch["labels"]
        inputs = {name: value for name, value in batch.items() if name not in ("answer_lengths", "answer_tokens", "labels")}
        of_encoding = len(self.limits)  # an encoder-decoder's answers share the encoding of their prompt
        logps_N = label_log_probabilities(model, {**inputs, "labels": batch["answer_tokens"]}, of_encoding)
        if not lengths:
            return Answers(logps_N.sum() * reference_P2, reference_P2, reference_P2)
        # Sums of slices, because adding by an index has no fixed order on a GPU.
        logps_P2 = torch.stack([part.sum() for part in logps_N.split(lengths)]).view(-1, 2)
        return Answers(logps_P2, reference_P2, torch.tensor(lengths, dtype=torch.float32).to(logps_P2.device).view(-1, 2))

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
        """With the reference's log-probabilities, if the loss has one."""
        if self.settings.loss in WITHOUT_REFERENCE:
            return evaluation
        known: Any = config
        return know_reference(self, known, sharded, rows, evaluation, folder, goes_on)


class Preference(Pairs, Causal):
    """The better of two answers by a causal model."""

    name = "preference"
    kind = "a causal model, of pairs of answers"
    counts_tokens = False

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
            "num_answer_tokens": [sum(counts) for counts in lost],
            "odd": [first or second for first, second in both["odd"]],
            "held": ["\0".join(filter(None, pair)) for pair in both["held"]],
            "is_endless": [first or second for first, second in both["is_endless"]],
            "omitted": [", ".join(filter(None, dict.fromkeys(pair))) for pair in both["omitted"]],
            "stop_token_ids": [sorted({*first, *second}) for first, second in both["stop_token_ids"]],
        }

    def check_model_config(self, model_config: PretrainedConfig, config: ModelConfig) -> None:
        if model_config.is_encoder_decoder:
            what = f"model.name_or_path {config.name_or_path} is a {model_config.model_type} model, an encoder-decoder"
            raise UserError(f"{what}: start recipes/dpo_t5.py, or write recipe: dpo_t5")
        super().check_model_config(model_config, config)

    # --- From features to the loss.

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        return PairCollator(pad_token_id, one_row=attends_by_document(model))

    def side_lengths(self, rows: Dataset) -> dict[str, np.ndarray]:
        return {"row": rows.with_format("numpy")["num_document_tokens"][:]}

    def computed_lengths(self, rows: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
        columns = rows.with_format("numpy")
        chosen, answers = columns["num_chosen_tokens"][:], columns["num_answer_tokens"][:]
        return [(chosen, answers), (columns["num_tokens"][:] - chosen, 0 * answers)]

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        labels = [IGNORED_LABEL] * (num_tokens - num_labels) + [token] * num_labels
        return {"input_ids": 2 * num_tokens * [token], "labels": 2 * labels, "num_chosen_tokens": num_tokens, "row_id": 0}

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        plain = CausalCollator(collator.pad_token_id, one_row=collator.one_row)
        check_causal_model(sharded, plain, packing=config.packs)

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        is_chat = example.messages is not None
        other: Any = {"messages": example.rejected} if is_chat else {"completion": example.rejected}
        answers = example, dataclasses.replace(example, **other)
        chosen, rejected = (super(Preference, self).show_texts(answer, tokenizer, config, where)["row"] for answer in answers)
        return {"row": f"chosen:\n{chosen}\nrejected:\n{rejected}"}
