"""Which held-out rows are evaluated, and how they are cut into batches."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from toolkit.data.collate import SummarizationCollator
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.evaluation.rows import EvaluationRows, choose_rows, plan_evaluation


def make_rows(*counts: int) -> EvaluationRows:
    """So many rows of each set, one after another, of different lengths; before them, 10 rows that are not evaluated."""
    import datasets

    rows = [{"row_id": 10 + i, "num_tokens": 5 + i * 7 % 11, "num_label_tokens": 1 + i % 3} for i in range(sum(counts))]
    tokenizer: Any = None
    inputs = ((10, ""), *((count, name) for name, count in zip("abcd", counts, strict=False)))
    return EvaluationRows(datasets.Dataset.from_list(rows), tokenizer, SummarizationCollator(0, 0), inputs=inputs)


@pytest.mark.parametrize(
    ("num_rows", "of_each"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (12, [4, 4, 4]), (40, [18, 18, 4]), (64, [30, 30, 4])]
)
def test_every_set_gives_as_many_rows_as_any_other_while_it_has_them(num_rows: int, of_each: list[int]) -> None:
    chosen = choose_rows(make_rows(30, 50, 4), num_rows)
    assert [len(rows.rows) for rows in chosen.sets.values()] == of_each
    first_row = {"a": 10, "b": 40, "c": 90}
    assert all(first_row[name] <= row_id for name, rows in chosen.sets.items() for row_id in rows.rows["row_id"][:])


def test_more_rows_include_those_of_fewer_in_their_order_and_are_not_the_first() -> None:
    held_out = make_rows(30, 50, 4)
    chosen = [choose_rows(held_out, num_rows).rows["row_id"][:] for num_rows in range(1, 85)]
    assert all(set(fewer) < set(more) for fewer, more in zip(chosen, chosen[1:], strict=False))
    assert all(row_ids == sorted(row_ids) for row_ids in chosen)
    row_ids = held_out.rows["row_id"][:]
    assert choose_rows(held_out, None).rows["row_id"][:] == choose_rows(held_out, 999).rows["row_id"][:] == row_ids
    without_sets = choose_rows(replace(held_out, inputs=()), 5).rows["row_id"][:]
    assert without_sets == sorted(sorted(row_ids, key=hash_of)[:5])


def hash_of(row_id: int) -> str:
    return hashlib.blake2b(f"evaluation row/{row_id}".encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_batch_holds_rows_of_one_set_and_every_row_comes_once(world_size: int) -> None:
    data = make_rows(7, 9, 0, 1)
    batches = [plan_evaluation(data, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    filled = [batch for of_rank in batches for batch in of_rank if batch]
    assert sorted(row for batch in filled for row in batch) == list(range(17))
    assert all(len(set(data.places[batch])) == 1 and len(batch) <= 4 for batch in filled)
    dealt = [of_rank[turn][0] for turn in range(len(batches[0])) for of_rank in batches if of_rank[turn]]
    lengths = [row["num_tokens"] - row["num_label_tokens"] for row in map(data.rows.__getitem__, dealt)]
    assert lengths == sorted(lengths, reverse=True)
    assert all(plan_evaluation(make_rows(world_size), 4, rank, world_size)[0] for rank in range(world_size))
    of_rope = [batch for rank in range(2) for batch in plan_evaluation(data, 4, rank, 2, [("longrope", 10)]) if batch]
    assert sorted(row for batch in of_rope for row in batch) == list(range(17))
    assert all(len({data.rows[row]["num_tokens"] > 10 for row in batch}) == 1 for batch in of_rope)


def test_rows_without_a_name_and_names_without_rows_are_no_sets_and_pieces_of_a_text_are_of_its_set() -> None:
    data = make_rows(2, 3)
    unnamed = replace(data, inputs=((10, "train"), (2, ""), (3, "b"), (0, "c")))
    assert {name: len(rows.rows) for name, rows in unnamed.sets.items()} == {"b": 3}
    assert replace(data, inputs=()).sets == {}
    rows = data.rows.map(lambda row: {"row_id": row["row_id"] + 3 * ROW_IDS_OF_A_PIECE})
    assert [part.rows["num_tokens"][:] for part in replace(data, rows=rows).sets.values()] == [[5, 12], [8, 15, 11]]
