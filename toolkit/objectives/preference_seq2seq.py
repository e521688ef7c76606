"""Pairs of answers by an encoder-decoder: a source, which is encoded once, with a chosen and a rejected target.

Shapes: `P` pairs, `S` source positions, `T` target positions; both targets of a pair are neighbours in the decoder's 2P rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from toolkit.data.collate import Batch, Collator, Row, SummarizationCollator
from toolkit.data.tokens.causal import locate
from toolkit.errors import UserError
from toolkit.objectives.preference import Pairs, documents_of, of_answers
from toolkit.objectives.reference import Reference
from toolkit.objectives.seq2seq import Seq2Seq

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.config.load import RecipeConfig
    from toolkit.parallel.wrap import ShardedModel


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


class Seq2SeqPreference(Pairs, Seq2Seq):
    """The better of two targets, given their source."""

    name = "preference_seq2seq"
    kind = "an encoder-decoder, of pairs of answers"

    both_tokens = ("labels",)

    def tokenize(  # type: ignore[override]
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """As of both targets, with the source once."""
        chats = [row_id for row_id, messages in zip(rows["row_id"], rows["messages"], strict=True) if messages is not None]
        if chats:
            where = locate(chats[0], origins)
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

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        of_one: Any = super().build_collator(model, pad_token_id)
        return SourcePairCollator(of_one.pad_token_id, of_one.decoder_start_token_id, of_one.own_shift)

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        ids, labels = [token] * num_tokens, 2 * num_labels * [token]
        return {"input_ids": ids, "labels": labels, "num_chosen_tokens": num_labels, "row_id": 0}

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        super().check_model(sharded, collator.plain(), config)
