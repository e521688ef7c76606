"""Collators: tokenized rows → the padded tensors of one micro-batch, with everything that the loss needs precomputed on the CPU.

Shapes: `B` rows of a tensor, `S` source positions, `T` target positions (all positions for a causal model), `N` labels that
count in the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from toolkit.data.batch_plan import MicroBatch
from toolkit.data.workers import load_ahead
from toolkit.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from datasets import Dataset

MULTIPLES, MOST_PADDING = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64), 0.03
"""Of lengths that micro-batches are padded up to; and how much that may add, as a share of tokens and other padding."""

Batch = dict[str, Any]
"""Tensors by name, and `document_lengths`, a list of integers."""
Row = dict[str, Any]


@dataclass(frozen=True)
class SummarizationCollator:
    """For an encoder-decoder. Rows have `input_ids` (the source) and `labels` (the target)."""

    pad_token_id: int
    decoder_start_token_id: int
    own_shift: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's own function from labels BT to decoder inputs BT, None: `decoder_inputs` shifts right. mBART's puts the
    language, a row's last label, first."""
    one_row = False  # as in `CausalCollator`; without an annotation it is not a field
    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels")
    """That `collate` reads."""
    multiples: tuple[int, ...] = (1, 1)
    """Sources and targets are padded up to multiples of these,"""
    longest: tuple[int, ...] = (0, 0)
    """but not beyond the longest source and target of all rows, which fit the model's positions."""

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """Inputs of `chunked_loss.summed_loss`: `model_inputs`, `label_positions` and `labels`. Packs hold one row each.

        There is no attention mask where it would mask nothing, which a model would have to read it to see
        (`models/patches/masks.py`). T5Gemma then takes padding ids for padding, so a source that holds one keeps its mask.

        If it `is_dummy`, every label is ignored; the rows only keep the collectives of all ranks matched.

        Returns:
            `input_ids` and perhaps `attention_mask` BS; `decoder_input_ids` BT; `label_positions` N, the positions in the
            flattened BT whose output predicts a label; `labels` N. All int64 on the CPU.
        """
        rows = [row for pack in packs for row in pack]
        labels_BT = _pad([row["labels"] for row in rows], IGNORED_LABEL, self.multiples[1], self.longest[1])
        inputs = self.prompts(rows)
        if (inputs["input_ids"] != self.pad_token_id).all():
            del inputs["attention_mask"]
        return {**inputs, "decoder_input_ids": self.decoder_inputs(labels_BT), **_counted_labels(labels_BT, is_dummy=is_dummy)}

    def decoder_inputs(self, labels_BT: torch.Tensor) -> torch.Tensor:
        """Decoder inputs BT for teacher forcing: the model's own, else the start token, then the labels shifted right by one,
        ignored labels as padding."""
        if self.own_shift is not None:
            return self.own_shift(labels_BT.clone())  # FSMT's writes into its argument
        shifted_BT = labels_BT.masked_fill(labels_BT == IGNORED_LABEL, self.pad_token_id).roll(1, dims=1)
        shifted_BT[:, 0] = self.decoder_start_token_id
        return shifted_BT

    def model_inputs(self, rows: Sequence[Row]) -> Batch:
        """Arguments of a forward pass that returns logits: `prompts`, and `decoder_input_ids` BT int64."""
        batch = self.collate([[row] for row in rows])
        return {name: tensor for name, tensor in batch.items() if name not in ("label_positions", "labels")}

    def prompts(self, rows: Sequence[Row]) -> Batch:
        """Arguments of `generate`: `input_ids` and `attention_mask`, BS int64, padded at the end."""
        sources, grid = [row["input_ids"] for row in rows], (self.multiples[0], self.longest[0])
        masks = [np.ones(len(source)) for source in sources]
        return {"input_ids": _pad(sources, self.pad_token_id, *grid), "attention_mask": _pad(masks, 0, *grid)}

    def new_tokens(self, generated_BT: torch.Tensor, prompts: Batch) -> torch.Tensor:
        """The generated tokens: everything that `generate` returns after the start token."""
        return generated_BT[:, 1:]


@dataclass(frozen=True)
class CausalCollator:
    """For a causal model.

    Rows have `input_ids`, `labels` of the same length (not shifted; `IGNORED_LABEL` where a token does not count, always so
    at the first position) and `prompt_length`, the number of tokens before the generated text.
    """

    pad_token_id: int
    one_row: bool = False
    """Concatenate all packs of a micro-batch into one row, and say where its documents lie: for an attention that computes
    document by document (`toolkit/models/patches/documents.py`). They then cost no padding and no attention across documents."""
    multiples: tuple[int, ...] = (1,)
    """Rows are padded up to multiples of this, except with `one_row`,"""
    longest: tuple[int, ...] = (0,)
    """but not beyond the longest row or pack."""
    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels")
    """That `collate` reads."""
    numbers_documents: bool = False
    """Also return `documents` BT: the 1-based document of each token, 0 for padding and in a dummy."""

    def collate(self, packs: Sequence[Sequence[Row]], *, is_dummy: bool = False) -> Batch:
        """As `SummarizationCollator.collate`. The rows of a pack are concatenated into one row of the tensors.

        There is no attention mask. Padding comes last, where causal attention never sees it; and only without a mask does
        transformers separate packed rows, by positions that restart at 0.

        Returns:
            `input_ids` BT; `position_ids` BT if a pack has several rows; `label_positions` N, the positions in the flattened
            BT whose output predicts a label that counts; `labels` N. All int64 on the CPU. With `one_row`, a batch of one row
            also has `document_lengths`, a list, and `document_starts`, int32: the first token of each document, and T.
        """
        is_packed = any(len(pack) > 1 for pack in packs)
        if self.one_row and is_packed:
            packs = [[row for pack in packs for row in pack]]
        tokens = [np.concatenate([row["input_ids"] for row in pack]) for pack in packs]
        labels = [np.concatenate([row["labels"] for row in pack]) for pack in packs]
        grid = (1 if self.one_row else self.multiples[0], self.longest[0])
        input_ids_BT = _pad(tokens, self.pad_token_id, *grid)
        # The output at t predicts token t + 1. A row's first token has no label, so no row predicts its neighbour.
        next_labels_BT = _pad(labels, IGNORED_LABEL, *grid).roll(-1, dims=1)
        next_labels_BT[:, -1] = IGNORED_LABEL
        batch: Batch = {"input_ids": input_ids_BT, **_counted_labels(next_labels_BT, is_dummy=is_dummy)}
        lengths = [[len(row["input_ids"]) for row in pack] for pack in packs]
        if self.numbers_documents:
            number = itertools.count(1)
            batch["documents"] = _pad([np.repeat([0 if is_dummy else next(number) for _ in of], of) for of in lengths], 0, *grid)
        if is_packed:  # positions restart at 0 with every row of a pack; padding counts as one more row
            padded = [[*pack, input_ids_BT.shape[1] - sum(pack)] for pack in lengths]
            positions = [np.concatenate([np.arange(length) for length in pack]) for pack in padded]
            batch["position_ids"] = torch.from_numpy(np.stack(positions))
        if self.one_row and len(packs) == 1:
            batch["document_lengths"] = [len(row["input_ids"]) for row in packs[0]]
            batch["document_starts"] = torch.from_numpy(np.cumsum([0, *batch["document_lengths"]], dtype=np.int32))
        return batch

    def model_inputs(self, rows: Sequence[Row]) -> Batch:
        """Arguments of a forward pass that returns logits: `input_ids` BT int64, padded at the end."""
        return {"input_ids": _pad([row["input_ids"] for row in rows], self.pad_token_id)}

    def prompts(self, rows: Sequence[Row]) -> Batch:
        """Arguments of `generate`: `input_ids` and `attention_mask`, BS int64, padded at the start, as `generate` appends."""
        prompts = [row["input_ids"][: row["prompt_length"]][::-1] for row in rows]
        masks = [np.ones(len(prompt)) for prompt in prompts]
        return {"input_ids": _pad(prompts, self.pad_token_id).flip(1), "attention_mask": _pad(masks, 0).flip(1)}

    def new_tokens(self, generated_BT: torch.Tensor, prompts: Batch) -> torch.Tensor:
        """The tokens that `generate` has appended to the prompts."""
        return generated_BT[:, prompts["input_ids"].shape[1] :]


Collator = SummarizationCollator | CausalCollator


def choose_multiples(shapes: Sequence[tuple[int, ...]], longest: tuple[int, ...]) -> tuple[int, ...]:
    """The coarsest grid within `MOST_PADDING` for micro-batches of these (rows, length, …): a multiple for each length."""
    table = np.array(shapes)
    rows, lengths = table[:, 0], table[:, 1:]
    padding = zip(lengths.T, longest, strict=True)
    added = [{by: rows @ np.minimum(-column % by, np.maximum(most - column, 0)) for by in MULTIPLES} for column, most in padding]
    grids = itertools.product(MULTIPLES, repeat=len(added))
    most = MOST_PADDING * (rows @ lengths).sum()
    return max((grid for grid in grids if sum(map(dict.__getitem__, added, grid)) <= most), key=math.prod)


def labels_at_positions(batch: Batch, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The labels of a collator's output BT int64, where the loss takes them; `IGNORED_LABEL` where none counts. `tokens_BT` are
    the inputs whose outputs predict them."""
    flat = torch.full_like(tokens_BT, IGNORED_LABEL).flatten()
    return flat.index_copy(0, batch["label_positions"], batch["labels"]).view_as(tokens_BT)


def move_to(device: torch.device, batch: Batch) -> Batch:
    """The batch with its tensors on `device`; the host does not wait where they are pinned."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }


def load_micro_batches(
    rows: Dataset, micro_batches: Iterable[MicroBatch], collator: Collator, *, num_workers: int, pin_memory: bool
) -> Iterator[tuple[MicroBatch, Batch]]:
    """Collate micro-batches in order; with `num_workers` above 0, ahead of their use."""
    rows = rows.select_columns(list(collator.columns))

    def collate(micro_batch: MicroBatch) -> Batch:
        packs = [[rows[row] for row in pack] for pack in micro_batch.packs]
        return collator.collate(packs, is_dummy=micro_batch.is_dummy)

    return load_ahead(collate, micro_batches, num_workers=num_workers, pin_memory=pin_memory)


def _counted_labels(labels_BT: torch.Tensor, *, is_dummy: bool) -> Batch:
    """`label_positions` N, where in the flattened BT a label counts, and `labels` N. A dummy has one label, which is ignored."""
    if is_dummy:
        return {"label_positions": torch.zeros(1, dtype=torch.int64), "labels": torch.tensor([IGNORED_LABEL])}
    label_positions_N = (labels_BT.flatten() != IGNORED_LABEL).nonzero().flatten()
    return {"label_positions": label_positions_N, "labels": labels_BT.flatten()[label_positions_N]}


def _pad(sequences: Sequence[Sequence[int] | np.ndarray], value: int, multiple: int = 1, longest: int = 0) -> torch.Tensor:
    width = max(map(len, sequences))
    width = max(width, min(-(-width // multiple) * multiple, longest))
    padded = np.full((len(sequences), width), value, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded)
