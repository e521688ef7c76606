"""The batch plan: which rows a step takes, and how they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.data.plan import BatchPlan, cut
from toolkit.errors import UserError

NUM_ROWS = 203


def build_plan(world_size: int = 1, micro_batch_size_rows: int = 4, seed: int = 0, global_batch_size_rows: int = 16) -> BatchPlan:
    random = np.random.Generator(np.random.PCG64(7))
    return BatchPlan(
        source_lengths=random.integers(1, 200, NUM_ROWS),
        target_lengths=random.integers(1, 20, NUM_ROWS),
        global_batch_size_rows=global_batch_size_rows,
        micro_batch_size_rows=micro_batch_size_rows,
        seed=seed,
        world_size=world_size,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_size_rows", [1, 3, 16])
def test_rows_of_a_step_depend_on_no_cut(world_size: int, micro_batch_size_rows: int) -> None:
    reference, plan = build_plan(), build_plan(world_size, micro_batch_size_rows)
    for number in range(1, 2 * reference.steps_per_epoch + 1):
        step = plan.step(number)
        assert step == reference.step(number)
        cuts = [plan.micro_batches(step, rank) for rank in range(world_size)]
        trained = [row for micro_batches in cuts for micro in micro_batches if micro.counts for row in micro.rows]
        assert sorted(trained) == sorted(step.rows)
        assert len({len(micro_batches) for micro_batches in cuts}) == 1, "ranks must run the same number of micro-batches"
        for micro_batches in cuts:
            assert [micro.is_last for micro in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
            assert all(1 <= len(micro.rows) <= micro_batch_size_rows for micro in micro_batches)


def test_an_epoch_takes_every_row_once_and_the_rest_last() -> None:
    plan = build_plan()
    steps = [plan.step(number) for number in range(1, plan.steps_per_epoch + 1)]
    assert sorted(row for step in steps for row in step.rows) == list(range(NUM_ROWS))
    assert [len(step.rows) for step in steps] == [16] * 12 + [NUM_ROWS - 12 * 16]
    assert {step.epoch for step in steps} == {0}
    assert plan.step(plan.steps_per_epoch + 1).epoch == 1


def test_seed_and_epoch_change_the_order() -> None:
    plan = build_plan()
    first = [plan.step(number).rows for number in range(1, 13)]
    second = [plan.step(plan.steps_per_epoch + number).rows for number in range(1, 13)]
    other_seed = [build_plan(seed=1).step(number).rows for number in range(1, 13)]
    assert len({tuple(map(tuple, order)) for order in (first, second, other_seed)}) == 3


def test_label_tokens_are_those_of_the_rows() -> None:
    plan = build_plan()
    for number in (1, 5, plan.steps_per_epoch):
        step = plan.step(number)
        assert step.num_label_tokens == plan.target_lengths[list(step.rows)].sum()
        assert step.num_tokens == step.num_label_tokens + plan.source_lengths[list(step.rows)].sum()


def test_batches_hold_rows_of_similar_length() -> None:
    """Padding to the longest of a batch costs far less than with random batches."""
    plan = build_plan()
    padded = sum(
        len(s.rows) * plan.source_lengths[list(s.rows)].max() for s in map(plan.step, range(1, plan.steps_per_epoch + 1))
    )
    order = np.random.Generator(np.random.PCG64(3)).permutation(NUM_ROWS)
    random = sum(len(rows) * plan.source_lengths[rows].max() for rows in np.split(order, range(16, NUM_ROWS, 16)))
    assert padded / plan.source_lengths.sum() < 1.35 < random / plan.source_lengths.sum()


def test_ranks_get_balanced_tokens() -> None:
    random = np.random.Generator(np.random.PCG64(1))
    costs = random.integers(1, 500, 64)
    for micro_batch in cut(np.arange(64), costs, num_ranks=4, micro_batch_size_rows=8):
        tokens = [costs[rows].sum() for rows in micro_batch]
        assert max(tokens) / min(tokens) < 1.2


def test_a_rank_without_rows_stays_in_step_and_does_not_count() -> None:
    plan = build_plan(world_size=8, micro_batch_size_rows=4)
    last = plan.step(plan.steps_per_epoch)
    assert len(last.rows) == 11
    few = BatchPlan(np.array([5, 3, 9]), np.array([1, 2, 3]), 2, 1, 0, world_size=2)
    ranks = [few.micro_batches(few.step(2), rank) for rank in range(2)]
    assert [micro.counts for micro_batches in ranks for micro in micro_batches] == [True, False]
    assert ranks[1][0].rows == few.step(2).rows


def test_fewer_rows_a_step_than_processes_is_refused() -> None:
    with pytest.raises(UserError, match="global_batch_size_rows is 4, smaller than the 8 processes"):
        build_plan(world_size=8, global_batch_size_rows=4)
