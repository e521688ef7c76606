"""Micro-batches as tensors."""

from __future__ import annotations

import pytest
import torch

from toolkit.data.collate import check_label_shift, collate, shift_right
from toolkit.errors import UserError
from toolkit.losses import IGNORED_LABEL

ROWS = [{"input_ids": [5, 6, 7, 1], "labels": [8, 1]}, {"input_ids": [9, 1], "labels": [4, 3, 1]}]


def test_rows_are_padded_to_the_longest() -> None:
    batch = collate(ROWS, pad_token_id=0, decoder_start_token_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [9, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[8, 1, IGNORED_LABEL], [4, 3, 1]]
    assert batch["decoder_input_ids"].tolist() == [[2, 8, 1], [2, 4, 3]]


def test_a_padding_id_inside_a_source_still_counts() -> None:
    batch = collate([{"input_ids": [0, 0, 1], "labels": [1]}], pad_token_id=0, decoder_start_token_id=0)
    assert batch["attention_mask"].tolist() == [[1, 1, 1]]


def test_rows_that_do_not_count_have_no_label() -> None:
    batch = collate(ROWS, pad_token_id=0, decoder_start_token_id=2, counts=False)
    assert (batch["labels"] == IGNORED_LABEL).all()
    assert batch["decoder_input_ids"].tolist() == [[2, 8, 1], [2, 4, 3]]


def test_shift_is_that_of_transformers() -> None:
    from transformers.models.bart.modeling_bart import shift_tokens_right

    labels_BT = torch.tensor([[5, 6, 1], [7, 1, IGNORED_LABEL]])
    assert torch.equal(shift_right(labels_BT, 1, 2), shift_tokens_right(labels_BT, 1, 2))


def test_a_model_that_shifts_in_its_own_way_is_refused() -> None:
    class TranslationModel(torch.nn.Module):
        def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
            return labels.flip(1)

    with pytest.raises(UserError, match="TranslationModel makes decoder inputs in a way of its own"):
        check_label_shift(TranslationModel(), 0, 2)
