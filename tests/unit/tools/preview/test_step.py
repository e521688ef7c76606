"""The first step's view: every row once, and the padding of the tensors that the ranks really get."""

import pytest
from datasets import Dataset

from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.data.collate import CausalCollator, SummarizationCollator
from toolkit.objectives.causal import Causal
from toolkit.objectives.preference import PairCollator, Preference, Seq2SeqPreference, SourcePairCollator
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.tools.preview.step import CONTEXT, LOSS, PADDING, StepView, view_step

LENGTHS = [9, 4, 7, 3, 8, 5, 6]


def causal_rows() -> Dataset:
    """Of each row, all but two tokens count."""
    labels = [[-100, *[5] * (n - 2), -100] for n in LENGTHS]
    return make_rows([[5] * n for n in LENGTHS], labels, LENGTHS, [n - 2 for n in LENGTHS])


def make_rows(ids: list[list[int]], labels: list[list[int]], num_tokens: list[int], num_labels: list[int]) -> Dataset:
    columns = {"input_ids": ids, "labels": labels, "num_tokens": num_tokens, "num_label_tokens": num_labels}
    return Dataset.from_dict({"row_id": list(range(100, 100 + len(ids))), **columns})


def view(rows: Dataset, collator, num_processes: int, **settings) -> StepView:
    columns = rows.with_format("numpy")
    train = TrainConfig(global_batch_size_rows=7, micro_batch_size_rows=2, max_steps=1)
    plan = BatchPlan(columns["num_tokens"][:], columns["num_label_tokens"][:], train, num_processes, **settings)
    kinds = {PairCollator: Preference, SourcePairCollator: Seq2SeqPreference, CausalCollator: Causal}
    objective = kinds.get(type(collator), Seq2Seq)()
    return view_step(objective, plan, rows, collator, 1)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("pack_length", [None, 12])
@pytest.mark.parametrize("one_row", [False, True])
def test_every_row_is_in_one_pack(num_processes, pack_length, one_row):
    step = view(causal_rows(), CausalCollator(0, one_row=one_row), num_processes, pack_length_tokens=pack_length)
    shown = [row for pack in step.packs for row in pack.row_ids]
    assert sorted(shown) == list(range(100, 107)) and sorted(step.plan.step(1).rows) == list(range(7))
    assert step.plan.step(1).num_label_tokens == sum(LENGTHS) - 14
    counted = {kind: sum(num for pack in step.packs for k, num in pack.parts if k == kind) for kind in (LOSS, CONTEXT)}
    assert counted == {kind: step.positions[kind] for kind in (LOSS, CONTEXT)} == {LOSS: sum(LENGTHS) - 14, CONTEXT: 14}
    # The packs of a micro-batch have one width.
    widths: dict[tuple[int, int], set[int]] = {}
    for pack in step.packs:
        widths.setdefault((pack.rank, pack.micro_batch), set()).add(sum(num for _, num in pack.parts))
        assert [pack.parts[begin] for begin in pack.begins] == [(CONTEXT, 1)] * len(pack.row_ids)
        assert pack.padding == {"row": sum(num for kind, num in pack.parts if kind == PADDING)}
    if one_row and pack_length:  # a micro-batch is one row of the tensors, without padding
        assert all("row" in pack.padding and pack.padding["row"] == 0 for pack in step.packs)
        assert step.num_tensor_rows == len(widths) < len(step.packs)
    else:
        assert all(len(of_one) == 1 for of_one in widths.values()) and step.num_tensor_rows == len(step.packs)
    assert all(pack is step.find_pack(row) for pack in step.packs for row in pack.row_ids) and step.find_pack(9) is None


def test_a_rank_without_rows_is_padding():
    step = view(causal_rows(), CausalCollator(0), 3)
    # Two micro-batches of two rows on three ranks: seven rows leave two ranks without one in the second.
    assert step.num_micro_batches == 2 and len(step.packs) == 7
    drawn = sum(num for pack in step.packs for _, num in pack.parts)
    filler = LENGTHS[step.plan.step(1).rows[0]]
    assert sum(step.positions.values()) == drawn + 2 * filler


def test_an_encoder_decoder_pads_sources_and_targets():
    num_labels = list(range(1, 8))
    num_tokens = [n + more for n, more in zip(LENGTHS, num_labels, strict=True)]
    rows = make_rows([[5] * n for n in LENGTHS], [[6] * n for n in num_labels], num_tokens, num_labels)
    step = view(rows, SummarizationCollator(0, 0), 1)
    assert len(step.packs) == 7 and step.num_micro_batches == 4
    assert step.positions[CONTEXT] == sum(LENGTHS) and step.positions[LOSS] == 28
    for pack in step.packs:
        place = pack.row_ids[0] - 100
        expected = [
            (CONTEXT, LENGTHS[place]),
            (PADDING, pack.padding["source"]),
            (LOSS, place + 1),
            (PADDING, pack.padding["target"]),
        ]
        assert pack.parts == [part for part in expected if part[1]]


@pytest.mark.parametrize("of_source", [False, True])
def test_documents_of_a_pair_are_padded_each_by_itself_unless_they_are_packed(of_source):
    answers = [(n, other) for n, other in zip(LENGTHS, LENGTHS[::-1], strict=True)]
    labels = [[6] * n + [6] * other if of_source else [-100, *[6] * (n - 1), -100, *[6] * (other - 1)] for n, other in answers]
    ids = [[5] * (4 if of_source else n + other) for n, other in answers]
    rows = make_rows(ids, labels, [len(row) for row in ids], [1] * 7)
    rows = rows.add_column("num_chosen_tokens", LENGTHS)
    collator = SourcePairCollator(0, 0) if of_source else PairCollator(0)
    step = view(rows, collator, 1)
    of_step = {}
    for pack in step.packs:
        of_step.setdefault(pack.micro_batch, []).append(pack)
    for packs in of_step.values():
        width = max(n for pack in packs for n in answers[pack.row_ids[0] - 100])
        for pack in packs:
            expected = [(CONTEXT, 4)] if of_source else []
            for num in answers[pack.row_ids[0] - 100]:
                expected += [(LOSS, num)] if of_source else [(CONTEXT, 1), (LOSS, num - 1)]
                expected += [(PADDING, width - num)] if num < width else []
            assert pack.parts == expected
            assert [*pack.padding.values()][-1] == sum(num for kind, num in expected if kind == PADDING)
    if not of_source:
        packed = view(rows, collator, 1, pack_length_tokens=24).packs
        assert any(len(pack.row_ids) > 1 for pack in packed)
        assert all([kind for kind, _ in pack.parts[:4]] == [CONTEXT, LOSS] * 2 for pack in packed)
