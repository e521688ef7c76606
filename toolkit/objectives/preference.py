"""Pairs of answers: of two answers to a prompt, the chosen one is to become the likelier one. `Pairs` is what causal models and
encoder-decoders share; `Preference` is a causal model's, `Seq2SeqPreference` an encoder-decoder's.

A row is a pair: two documents, prompt and chosen answer, prompt and rejected answer; or a source, which is encoded once, with a
chosen and a rejected target. What it counts is the pair, so a step's loss is divided by the pairs of the global batch. The losses
are in `preference_losses.py`.

Shapes: `P` pairs, with the chosen answer before the rejected one where a 2 follows; `N` tokens of all answers; `S` source
positions, `T` target positions; both targets of a pair are neighbours in the decoder's 2P rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from toolkit.config.schema import ModelConfig, PreferenceLossConfig
from toolkit.data.collate import Batch, CausalCollator, Collator, Row, SummarizationCollator
from toolkit.data.rows.columns import choose_preference_columns
from toolkit.data.rows.example import Example
from toolkit.data.tokens import causal
from toolkit.data.tokens.cuts import SIDES
from toolkit.errors import UserError
from toolkit.loss import IGNORED_LABEL
from toolkit.models.patches.chunked_loss import label_log_probabilities
from toolkit.objectives.causal import Causal
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference_losses import LOSSES, SMOOTHED, WITHOUT_REFERENCE, Answers, difference
from toolkit.objectives.reference import Reference, know_reference
from toolkit.objectives.seq2seq import Seq2Seq

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.config.load import RecipeConfig
    from toolkit.parallel.wrap import ShardedModel

FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")

_TOKENS = ("input_ids", "labels")
_SUMS = ("num_tokens", "num_given_tokens", "num_lost_tokens", "num_lost_target_tokens", "num_unknown_target_tokens")
_OF_BOTH: dict[str, Callable[[tuple[Any, Any]], Any]] = {
    **dict.fromkeys(_SUMS, sum),
    **dict.fromkeys(("odd", "is_endless"), lambda pair: pair[0] or pair[1]),
    "held": lambda pair: "\0".join(filter(None, pair)),
    "omitted": lambda pair: ", ".join(filter(None, dict.fromkeys(pair))),
    "stop_token_ids": lambda pair: sorted({*pair[0], *pair[1]}),
}
"""What a column of a pair is, of those of its answers."""


@dataclass(frozen=True)
class PairCollator(CausalCollator):
    """Rows are pairs: `input_ids` and `labels` of both documents, one after the other, and `num_chosen_tokens`."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "num_chosen_tokens", "row_id")
    reference: Reference = field(default_factory=Reference, repr=False, compare=False)

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """As `CausalCollator.collate`, of both documents of each pair: two rows of the tensors, or neighbours in a pack; and what
        `of_answers` adds."""
        pairs = [pair for pack in packs for pair in pack]
        documents = [[document for pair in pack for document in documents_of(pair, _TOKENS)] for pack in packs]
        if not self.one_row and len(pairs) == len(packs):
            documents = [[document] for pack in documents for document in pack]
        batch = super().collate(documents, is_dummy=is_dummy)
        return of_answers(batch, [] if is_dummy else pairs, self.reference)


@dataclass(frozen=True)
class SourcePairCollator(SummarizationCollator):
    """Rows are pairs: `input_ids` of the source, `labels` of both targets, one after the other, and `num_chosen_tokens`."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "num_chosen_tokens", "row_id")
    reference: Reference = field(default_factory=Reference, repr=False, compare=False)

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """As `SummarizationCollator.collate`, and what `of_answers` adds; `input_ids` and `attention_mask` PS, the decoder's
        inputs 2P, T."""
        pairs = [pair for pack in packs for pair in pack]
        targets = [target for pair in pairs for target in documents_of(pair, ("labels",))]
        batch = super().collate([[target] for target in targets], is_dummy=is_dummy)
        batch |= {name: batch[name][::2] for name in ("input_ids", "attention_mask") if name in batch}
        return of_answers(batch, [] if is_dummy else pairs, self.reference)

    def model_inputs(self, rows: Sequence[Row]) -> Batch:
        """As of one target: all labels of a row."""
        return self.plain().model_inputs(rows)

    def plain(self) -> SummarizationCollator:
        """That of sources with one target."""
        return SummarizationCollator(self.pad_token_id, self.decoder_start_token_id, self.own_shift)


def of_answers(batch: Batch, pairs: list[Row], reference: Reference) -> Batch:
    """The batch of both answers of each pair (none in a dummy), with `answer_tokens` N, the tokens at `label_positions`;
    `answer_lengths`, a list of 2P counts of them, and `num_tokens_P2`, the same in fp32, which move with the batch: a tensor made
    in the step would wait for a GPU; and `labels`, what counts: the pairs, by the reference's log-probabilities P2 fp32, zeros
    where they are not known."""
    answers = [np.asarray(answer["labels"]) for pair in pairs for answer in documents_of(pair, ("labels",))]
    lengths = [int(np.count_nonzero(labels != IGNORED_LABEL)) for labels in answers]
    num_tokens_P2 = torch.tensor(lengths, dtype=torch.float32).view(-1, 2)
    known = {"labels": torch.from_numpy(reference.of_pairs(pairs)), "answer_lengths": lengths, "num_tokens_P2": num_tokens_P2}
    return {**batch, "answer_tokens": batch["labels"], **known}


def documents_of(pair: Row, names: tuple[str, ...]) -> list[Row]:
    """The chosen and the rejected document of a pair, as rows of a model of texts; `names` are the columns that have the tokens
    of both, one after the other."""
    place = pair["num_chosen_tokens"]
    return [pair | {name: pair[name][part] for name in names} for part in (slice(place), slice(place, None))]


class Pairs(Objective):
    """What the objectives of pairs share; the other base of each is that of its answers."""

    num_second_sums = 6
    logs_metrics = True
    counted = "pair"
    num_documents = 2
    default_dropout = 0.0
    drops_unlabelled = True

    both_tokens: ClassVar[tuple[str, ...]] = _TOKENS
    """Columns that have the tokens of both answers, one after the other; the last one's are those that count."""
    collator: ClassVar[Any] = PairCollator
    """That of both answers; it inherits from the one of their base."""

    choose_columns = staticmethod(choose_preference_columns)
    complete_evaluation = know_reference

    def __init__(self, config: RecipeConfig | None = None) -> None:
        self.settings: PreferenceLossConfig = getattr(config, "preference", PreferenceLossConfig())
        name, share = self.settings.loss, self.settings.label_smoothing
        if name not in LOSSES:
            raise UserError(f"preference.loss is {name}: choose one of {', '.join(LOSSES)}")
        takes = {"label_smoothing": SMOOTHED, "margin": ("simpo",), "reference": LOSSES.keys() - WITHOUT_REFERENCE}
        for key, losses in takes.items():
            given = getattr(self.settings, key)
            if given != getattr(PreferenceLossConfig(), key) and name not in losses:
                raise UserError(f"preference.{key} is {given}, but {name} has none: leave it out")
        if share >= 0.5:
            raise UserError(f"preference.label_smoothing is {share}, so most pairs would be wrong: give less than 0.5")
        if config is not None and config.optim.label_smoothing:
            raise UserError("optim.label_smoothing is that of cross-entropy over tokens: set preference.label_smoothing")
        if config is not None and config.optim.router_aux_loss != "off":
            raise UserError("optim.router_aux_loss knows no pairs, whose answers are documents of their own: leave it out")

    def list_settings(self, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        return super().list_settings(config, tokenizer) | {"pairs": 2}  # of these columns

    def tokenize(  # type: ignore[override]
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """As the answers' base, of both: their tokens one after the other, and what else holds for both."""
        others = [
            (None, other) if chat else (other, None) for chat, other in zip(rows["messages"], rows["rejected"], strict=True)
        ]
        answers = rows, rows | dict(zip(("completion", "messages"), map(list, zip(*others, strict=True)), strict=True))
        chosen, rejected = (super(Pairs, self).tokenize(each, tokenizer, config, origins) for each in answers)
        both = {name: list(zip(values, rejected[name], strict=True)) for name, values in chosen.items()}
        counts, tokens = both["num_label_tokens"], both[self.both_tokens[0]]
        return chosen | {
            **{name: [np.concatenate(pair) for pair in both[name]] for name in self.both_tokens},
            **{name: list(map(of_both, both[name])) for name, of_both in _OF_BOTH.items() if name in both},
            "num_label_tokens": [int(all(nums) and not np.array_equal(*pair)) for nums, pair in zip(counts, tokens, strict=True)],
            "num_chosen_tokens": [len(first) for first, _ in tokens],
            "num_document_tokens": [max(map(len, pair)) for pair in tokens],
            "num_answer_tokens": [sum(nums) for nums in counts],
        }

    def check_model_config(self, model_config: PretrainedConfig, config: ModelConfig) -> None:
        if model_config.is_encoder_decoder != bool(self.label_side):
            kind, other = ("not an encoder-decoder", "dpo") if self.label_side else ("an encoder-decoder", "dpo_t5")
            what = f"model.name_or_path {config.name_or_path} is a {model_config.model_type} model, {kind}"
            raise UserError(f"{what}: start recipes/{other}.py, or write recipe: {other}")
        super().check_model_config(model_config, config)

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        other: Any = {"completion" if example.messages is None else "messages": example.rejected}
        answers = example, dataclasses.replace(example, **other)
        texts, rejected = (super(Pairs, self).show_texts(answer, tokenizer, config, where) for answer in answers)
        side = [*self.limits][-1]
        return texts | {side: f"chosen:\n{texts[side]}\nrejected:\n{rejected[side]}"}

    def documents(self, row: Row) -> list[Row]:
        return documents_of(row, self.both_tokens)

    def report(self, counts: dict[str, np.ndarray], config: Any, name: str, origins: list[tuple[str, int]]) -> list[str]:
        """As of its answers; pairs without a preference after the cut are left out."""
        is_good = counts["num_label_tokens"] > 0
        sentences, num_bad = [], int((~is_good).sum())
        if num_bad:
            first = causal.locate(int(counts["row_id"][~is_good][0]), origins)
            what = f"{num_bad} of {len(is_good)} {SIDES[name]} pairs (first: {first})"
            side = [*self.limits.values()][-1]
            limit = f"data.{side} = {getattr(config, side)}"
            if num_bad == len(is_good) and name == "train":
                raise UserError(f"{what} have an empty answer or equal ones within {limit}: raise it, or change the rows")
            sentences = [f"left out {what}: within {limit}, one answer is empty, or both are equal"]
        return sentences + super().report({column: cells[is_good] for column, cells in counts.items()}, config, name, origins)

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        return self.collator(**vars(super().build_collator(model, pad_token_id)))

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        row = super().build_row(num_tokens, num_labels, token)
        both = {name: 2 * row[name] for name in self.both_tokens}
        return row | both | {"num_chosen_tokens": len(row[self.both_tokens[0]]), "row_id": 0}

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

    def loss_settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self.settings)

    def describe_first_pass(self, config: RecipeConfig) -> str:
        if self.settings.loss in WITHOUT_REFERENCE:
            return ""
        other = f", and {self.settings.reference} in the dtype of frozen weights" if self.settings.reference else ""
        doing = f"before step 1 a forward of all pairs, eval.batch_size_rows {config.eval.batch_size_rows} at a time"
        return f"{doing}: a third of an epoch's time, half with an adapter; memory of an evaluation without texts{other}"

    def answers_of(self, model: nn.Module, batch: Batch) -> Answers:
        """The log-probabilities of a batch of `of_answers`, on the device. Collective under FSDP."""
        lengths, reference_P2 = batch["answer_lengths"], batch["labels"]
        own = ("answer_lengths", "num_tokens_P2", "answer_tokens", "labels")
        inputs = {name: value for name, value in batch.items() if name not in own}
        of_encoding = len(self.limits)  # an encoder-decoder's answers share the encoding of their prompt
        logps_N = label_log_probabilities(model, {**inputs, "labels": batch["answer_tokens"]}, of_encoding)
        if not lengths:
            return Answers(logps_N.sum() * reference_P2, reference_P2, reference_P2)
        # Sums of slices, because adding by an index has no fixed order on a GPU.
        logps_P2 = torch.stack([part.sum() for part in logps_N.split(lengths)]).view(-1, 2)
        return Answers(logps_P2, reference_P2, batch["num_tokens_P2"])


class Preference(Pairs, Causal):
    """The better of two answers by a causal model."""

    name = "preference"
    kind = "a causal model, of pairs of answers"
    counts_tokens = False

    def side_lengths(self, rows: Dataset) -> dict[str, np.ndarray]:
        return {"row": rows.with_format("numpy")["num_document_tokens"][:]}

    def computed_lengths(self, rows: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
        columns = rows.with_format("numpy")
        chosen, answers = columns["num_chosen_tokens"][:], columns["num_answer_tokens"][:]
        return [(chosen, answers), (columns["num_tokens"][:] - chosen, 0 * answers)]

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        super().check_model(sharded, CausalCollator(collator.pad_token_id, one_row=collator.one_row), config)


class Seq2SeqPreference(Pairs, Seq2Seq):
    """The better of two targets, given their source."""

    name = "preference_seq2seq"
    kind = "an encoder-decoder, of pairs of answers"

    both_tokens = ("labels",)
    collator = SourcePairCollator

    def tokenize(  # type: ignore[override]
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """As of both targets, with the source once."""
        chats = [row_id for row_id, messages in zip(rows["row_id"], rows["messages"], strict=True) if messages is not None]
        if chats:
            where = causal.locate(chats[0], origins)
            raise UserError(f"{where}: a pair of lists of messages, and an encoder-decoder takes texts: give texts")
        columns = super().tokenize(rows, tokenizer, config, origins)
        once = zip(columns["num_tokens"], columns["input_ids"], strict=True)
        return columns | {"num_tokens": [num - len(source) for num, source in once]}

    def side_lengths(self, rows: Dataset) -> dict[str, np.ndarray]:
        columns = rows.with_format("numpy")
        sources = columns["num_tokens"][:] - columns["num_answer_tokens"][:]
        return {"source": sources, "target": columns["num_document_tokens"][:]}

    def computed_lengths(self, rows: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
        columns, sources = rows.with_format("numpy"), self.side_lengths(rows)["source"]
        chosen = columns["num_chosen_tokens"][:]
        return [(sources, chosen), (sources, columns["num_answer_tokens"][:] - chosen)]

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        super().check_model(sharded, collator.plain(), config)
