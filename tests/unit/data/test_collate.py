"""Micro-batches as tensors."""

import multiprocessing
import signal

import pytest
import torch

from toolkit.data import workers
from toolkit.data.collate import CausalCollator, SummarizationCollator, labels_at_positions
from toolkit.loss import IGNORED_LABEL

PACKS = [[{"input_ids": [5, 6, 7, 1], "labels": [8, 1]}], [{"input_ids": [9, 1], "labels": [4, 3, 5, 1]}]]
COLLATOR = SummarizationCollator(pad_token_id=0, decoder_start_token_id=2)


def test_rows_are_padded_to_the_longest_and_labels_shifted_as_by_transformers():
    from transformers.models.bart.modeling_bart import shift_tokens_right

    batch = COLLATOR.collate(PACKS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [9, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["label_positions"].tolist() == [0, 1, 4, 5, 6, 7]
    assert batch["labels"].tolist() == [8, 1, 4, 3, 5, 1]
    labels_BT = labels_at_positions(batch, batch["decoder_input_ids"])
    assert labels_BT.tolist() == [[8, 1, IGNORED_LABEL, IGNORED_LABEL], [4, 3, 5, 1]]
    assert torch.equal(batch["decoder_input_ids"], shift_tokens_right(labels_BT, 0, 2))

    batch = COLLATOR.collate([[{"input_ids": [0, 0, 1], "labels": [1]}]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1]], "a padding id inside a source counts"


def test_a_model_s_own_shift_is_taken_and_labels_stay_as_they_are():
    """mBART begins with a row's last label; FSMT's method writes padding over the ignored ones of its argument."""
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=16, tgt_vocab_size=16, pad_token_id=0, **sizes)
    with torch.device("meta"):
        model = FSMTForConditionalGeneration(config)
    batch = SummarizationCollator(0, 2, model.prepare_decoder_input_ids_from_labels).collate(PACKS)
    assert batch["decoder_input_ids"].tolist() == [[1, 8, 1, 0], [1, 4, 3, 5]]
    assert batch["labels"].tolist() == [8, 1, 4, 3, 5, 1]


def causal_row(token_ids: list[int], prompt_length: int) -> dict:
    labels = [IGNORED_LABEL] * prompt_length + token_ids[prompt_length:]
    return {"input_ids": token_ids, "labels": labels, "prompt_length": prompt_length}


CAUSAL_ROWS = [causal_row([5, 6, 7, 8], 2), causal_row([9, 4], 1), causal_row([3, 2, 1], 1)]


def test_packed_rows_start_again_at_position_0_and_predict_no_neighbour_and_unpacked_ones_have_the_same_labels():
    unpacked, packs = [[row] for row in CAUSAL_ROWS], [CAUSAL_ROWS[:2], CAUSAL_ROWS[2:]]
    in_one_row = [[5, 6, 7, 8, 9, 4, 3, 2, 1]]  # as flash attention gets packs, without padding
    for rows, one_row, ids, positions, places in (
        (unpacked, False, [[5, 6, 7, 8], [9, 4, 0, 0], [3, 2, 1, 0]], None, [1, 2, 4, 8, 9]),
        (packs, False, [[5, 6, 7, 8, 9, 4], [3, 2, 1, 0, 0, 0]], [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]], [1, 2, 4, 6, 7]),
        (packs, True, in_one_row, [[0, 1, 2, 3, 0, 1, 0, 1, 2]], [1, 2, 4, 6, 7]),
    ):
        batch = CausalCollator(0, one_row=one_row).collate(rows)
        assert batch["input_ids"].tolist() == ids and batch["labels"].tolist() == [7, 8, 4, 2, 1]
        assert batch["label_positions"].tolist() == places and "attention_mask" not in batch
        assert (batch["position_ids"].tolist() if "position_ids" in batch else None) == positions
    assert CausalCollator(0, one_row=True).collate(unpacked)["input_ids"].shape == (3, 4)


def test_rows_that_do_not_count_have_one_ignored_label():
    batch = COLLATOR.collate(PACKS, is_dummy=True)
    assert batch["decoder_input_ids"].tolist() == [[2, 8, 1, 0], [2, 4, 3, 5]]
    for dummy in (batch, CausalCollator(0).collate([CAUSAL_ROWS], is_dummy=True)):
        assert dummy["labels"].tolist() == [IGNORED_LABEL] and dummy["label_positions"].tolist() == [0]


def test_prompts_are_padded_at_their_start():
    collator = CausalCollator(0)
    prompts = collator.prompts(CAUSAL_ROWS[:2])
    assert prompts["input_ids"].tolist() == [[5, 6], [0, 9]]
    assert prompts["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert collator.new_tokens(torch.tensor([[5, 6, 11, 12], [0, 9, 13, 0]]), prompts).tolist() == [[11, 12], [13, 0]]


@pytest.mark.parametrize("one_row", [False, True])
def test_documents_are_numbered_and_padding_is_none(one_row):
    collator, packs = CausalCollator(0, one_row=one_row, numbers_documents=True), [CAUSAL_ROWS[:2], CAUSAL_ROWS[2:]]
    padded = [[1, 1, 1, 1, 2, 2], [3, 3, 3, 0, 0, 0]]
    assert collator.collate(packs)["documents"].tolist() == ([[1, 1, 1, 1, 2, 2, 3, 3, 3]] if one_row else padded)
    unpacked = collator.collate([[row] for row in CAUSAL_ROWS])
    assert unpacked["documents"].tolist() == [[1, 1, 1, 1], [2, 2, 0, 0], [3, 3, 3, 0]]
    assert not collator.collate(packs, is_dummy=True)["documents"].any()


def test_only_data_workers_are_ended_at_exit(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe()
    own, worker = (processes.Process(target=receiver.poll, args=(60,), daemon=is_daemon) for is_daemon in (False, True))
    for process in (own, worker):
        process.start()
    workers._end_workers()
    sender.send(None)  # ends the one that is left
    for process in (own, worker):
        process.join()
    assert (own.exitcode, worker.exitcode) == (0, -signal.SIGKILL)
