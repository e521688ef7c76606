"""Which held-out rows are evaluated, and how they are cut into batches."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from toolkit.config.data import LLMDataConfig, MixEntry
from toolkit.data.collate import SummarizationCollator
from toolkit.evaluation.rows import EvaluationRows, choose_rows, name_sources, plan_evaluation


def make_rows(*counts: int) -> Any:
    """So many rows of each source, one after another, of different lengths."""
    import datasets

    sources = [source for source, count in enumerate(counts) for _ in range(count)]
    rows = [
        {"row_id": 10 + i, "source_index": source, "num_tokens": 5 + i * 7 % 11, "num_label_tokens": 1 + i % 3}
        for i, source in enumerate(sources)
    ]
    return datasets.Dataset.from_list(rows)


def evaluated(rows: Any, *names: str) -> EvaluationRows:
    tokenizer: Any = None
    return EvaluationRows(rows, tokenizer, SummarizationCollator(0, 0), source_names=names)


@pytest.mark.parametrize(
    ("num_rows", "of_each"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (12, [4, 4, 4]), (40, [18, 18, 4]), (64, [30, 30, 4])]
)
def test_every_source_gives_as_many_rows_as_any_other_while_it_has_them(num_rows: int, of_each: list[int]) -> None:
    chosen = choose_rows(make_rows(30, 50, 4), num_rows)
    assert [chosen["source_index"][:].count(source) for source in range(3)] == of_each


def test_more_rows_include_those_of_fewer_in_their_order_and_are_not_the_first() -> None:
    held_out = make_rows(30, 50, 4)
    chosen = [choose_rows(held_out, num_rows)["row_id"][:] for num_rows in range(1, 85)]
    assert all(set(fewer) < set(more) for fewer, more in zip(chosen, chosen[1:], strict=False))
    assert all(row_ids == sorted(row_ids) for row_ids in chosen)
    assert choose_rows(held_out, None)["row_id"][:] == choose_rows(held_out, 999)["row_id"][:] == held_out["row_id"][:]
    without_sources = choose_rows(held_out.remove_columns("source_index"), 5)["row_id"][:]
    assert without_sources == sorted(sorted(held_out["row_id"][:], key=hash_of)[:5])


def hash_of(row_id: int) -> str:
    return hashlib.blake2b(f"evaluation row/{row_id}".encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_batch_holds_rows_of_one_source_and_every_row_comes_once(world_size: int) -> None:
    data = evaluated(make_rows(7, 9, 0, 1), "a", "b", "c", "d")
    batches = [plan_evaluation(data, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    filled = [batch for of_rank in batches for batch in of_rank if batch]
    assert sorted(row for batch in filled for row in batch) == list(range(17))
    assert all(len(set(data.sources[batch])) == 1 and len(batch) <= 4 for batch in filled)
    dealt = [of_rank[turn][0] for turn in range(len(batches[0])) for of_rank in batches if of_rank[turn]]
    lengths = [row["num_tokens"] - row["num_label_tokens"] for row in map(data.rows.__getitem__, dealt)]
    assert lengths == sorted(lengths, reverse=True)
    assert all(plan_evaluation(evaluated(make_rows(world_size)), 4, rank, world_size)[0] for rank in range(world_size))


def test_entries_are_named_by_their_source_or_their_place() -> None:
    entries = [MixEntry(source=source) for source in ("rows", "jsonl", "some/chats", "jsonl")]
    assert name_sources(LLMDataConfig(mix=entries)) == ("rows", "mix[1]", "some/chats", "mix[3]")
    own = [MixEntry(source=source) for source in ("../rows/my_rows.py:a", "my_rows.py:b", "a/x.py:f", "b/x.py:f")]
    assert name_sources(LLMDataConfig(mix=own)) == ("my_rows.py:a", "my_rows.py:b", "mix[2]", "mix[3]")
    assert name_sources(LLMDataConfig(mix=entries[:1])) == name_sources(LLMDataConfig(source="rows")) == ()
    assert name_sources(LLMDataConfig(mix=entries, eval_files="held_out.jsonl")) == ()
