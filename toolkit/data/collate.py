"""Tokenized rows → padded tensors of one micro-batch, with everything the loss needs known beforehand.

Shapes: `B` rows, `S` source positions, `T` target positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from toolkit.data.plan import MicroBatch
from toolkit.errors import UserError
from toolkit.losses import IGNORED_LABEL

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, torch.Tensor]


def shift_right(labels_BT: torch.Tensor, pad_token_id: int, decoder_start_token_id: int) -> torch.Tensor:
    """Decoder inputs of teacher forcing: the labels one place later, the start token first, ignored ones as padding."""
    shifted_BT = labels_BT.new_full(labels_BT.shape, pad_token_id)
    shifted_BT[:, 0] = decoder_start_token_id
    shifted_BT[:, 1:] = labels_BT[:, :-1].masked_fill(labels_BT[:, :-1] == IGNORED_LABEL, pad_token_id)
    return shifted_BT


def check_label_shift(model: nn.Module, pad_token_id: int, decoder_start_token_id: int) -> None:
    """The collator makes decoder inputs itself; be sure that the model would make the same.

    Raises:
        UserError: the model shifts labels in a way of its own (mBART puts the language there).
    """
    theirs = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    labels_BT = torch.tensor([[5, 6, 7, 1], [8, 1, IGNORED_LABEL, IGNORED_LABEL]])
    if theirs and not torch.equal(theirs(labels=labels_BT), shift_right(labels_BT, pad_token_id, decoder_start_token_id)):
        raise UserError(f"{type(model).__name__} makes decoder inputs in a way of its own, which is not supported")


def collate(rows: list[dict], pad_token_id: int, decoder_start_token_id: int, *, counts: bool = True) -> Batch:
    """Pad rows to the longest.

    Args:
        rows: each with `input_ids` and `labels`, lists of token ids.
        counts: False ignores every label: the rows only keep collectives in step.

    Returns:
        `input_ids` BS, `attention_mask` BS, `decoder_input_ids` BT, `labels` BT; all int64 on the CPU.
    """
    input_ids_BS = _pad([row["input_ids"] for row in rows], pad_token_id)
    lengths_B = torch.tensor([len(row["input_ids"]) for row in rows])
    labels_BT = _pad([row["labels"] for row in rows], IGNORED_LABEL)
    decoder_input_ids_BT = shift_right(labels_BT, pad_token_id, decoder_start_token_id)
    if not counts:
        labels_BT = torch.full_like(labels_BT, IGNORED_LABEL)
    return {
        "input_ids": input_ids_BS,
        "attention_mask": (torch.arange(input_ids_BS.shape[1]) < lengths_B[:, None]).long(),
        "decoder_input_ids": decoder_input_ids_BT,
        "labels": labels_BT,
    }


def load_micro_batches(
    rows: Dataset,
    micro_batches: Iterable[MicroBatch],
    pad_token_id: int,
    decoder_start_token_id: int,
    num_workers: int,
    pin_memory: bool,
) -> Iterator[tuple[MicroBatch, Batch]]:
    """Collate micro-batches in order, ahead of their use where `num_workers` is not 0."""
    loader = torch.utils.data.DataLoader(
        _CollatedRows(rows.select_columns(["input_ids", "labels"]), pad_token_id, decoder_start_token_id),
        sampler=micro_batches,  # type: ignore[arg-type]  # any iterable of keys will do
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_unchanged,  # type: ignore[arg-type]  # items are collated where they are read
    )
    return iter(loader)


class _CollatedRows(torch.utils.data.Dataset):
    """A map from a `MicroBatch` to its tensors; its own class because loader workers pickle it."""

    def __init__(self, rows: Dataset, pad_token_id: int, decoder_start_token_id: int) -> None:
        self.rows, self.pad_token_id, self.decoder_start_token_id = rows, pad_token_id, decoder_start_token_id

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Batch]:
        rows = [self.rows[row] for row in micro_batch.rows]
        batch = collate(rows, self.pad_token_id, self.decoder_start_token_id, counts=micro_batch.counts)
        return micro_batch, batch


def _unchanged(item: tuple[MicroBatch, Batch]) -> tuple[MicroBatch, Batch]:
    return item


def _pad(sequences: list[list[int]], value: int) -> torch.Tensor:
    padded = np.full((len(sequences), max(map(len, sequences))), value, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded)
