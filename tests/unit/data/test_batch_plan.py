"""The batch plan: which rows a step takes, how they are packed and cut, and the grid of lengths that they are padded to."""

from fractions import Fraction

import numpy as np
import pytest

from tests.support.refusals import refusal
from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan, Mix, Step, cut, draw_mix, pack_best_fit
from toolkit.data.collate import choose_multiples

NUM_ROWS = 203
KINDS = {
    "bucketed": {},
    "shuffled": {"bucket_by_length": False},
    "packed": {"bucket_by_length": False, "pack_length_tokens": 256},
    "packed and bucketed": {"pack_length_tokens": 256},
    "by tokens": {"global_batch_size_tokens": 1600},
    "packed by tokens": {"global_batch_size_tokens": 1600, "bucket_by_length": False, "pack_length_tokens": 256},
    "mixed": {"mix": Mix(np.arange(NUM_ROWS) % 3, (3.0, 1.0, 0.5)), "bucket_by_length": False},
}


def build_plan(world_size: int = 1, micro_batch_size_rows: int = 4, **settings) -> BatchPlan:
    """Of rows of random lengths, with settings of `TrainConfig` or of the plan."""
    random = np.random.Generator(np.random.PCG64(7))
    sources, targets = random.integers(1, 200, NUM_ROWS), random.integers(1, 20, NUM_ROWS)
    train = {"global_batch_size_rows": 16} | {key: settings.pop(key) for key in list(settings) if hasattr(TrainConfig, key)}
    config = TrainConfig(micro_batch_size_rows=micro_batch_size_rows, **train)
    return BatchPlan(sources + targets, targets, config, world_size=world_size, **settings)


def steps_of(plan: BatchPlan) -> list[Step]:
    """Those of the first epoch."""
    return [plan.step(number) for number in range(1, plan.steps_per_epoch + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "micro_batch_size_rows"), [(1, 1), (2, 3), (3, 16), (8, 3)])
def test_rows_of_a_step_depend_on_no_cut(kind, world_size, micro_batch_size_rows):
    reference, plan = build_plan(**KINDS[kind]), build_plan(world_size, micro_batch_size_rows, **KINDS[kind])
    for number in range(1, 2 * reference.steps_per_epoch + 1):
        step = plan.step(number)
        assert step == reference.step(number)
        cuts = [plan.micro_batches(step, rank) for rank in range(world_size)]
        trained = [row for micro_batches in cuts for micro in micro_batches for row in micro.rows]
        assert sorted(trained) == sorted(step.rows)
        assert len({len(micro_batches) for micro_batches in cuts}) == 1, "ranks must run the same number of micro-batches"
        for micro_batches in cuts:
            assert [micro.is_last for micro in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
            assert all(1 <= len(micro.packs) <= micro_batch_size_rows for micro in micro_batches)


@pytest.mark.parametrize("kind", ["packed", "packed and bucketed", "packed by tokens"])
def test_packs_are_full_and_never_too_long_and_leave_the_steps_alone(kind):
    plan = build_plan(**KINDS[kind])
    plain = build_plan(**{name: value for name, value in KINDS[kind].items() if name != "pack_length_tokens"})
    packed, width = 0, 0
    for number, step in enumerate(steps_of(plan), start=1):
        assert step == plain.step(number)
        packs = [pack for micro in plan.micro_batches(step, 0) for pack in micro.packs]
        lengths = [plan.num_tokens[list(pack)].sum() for pack in packs]
        assert max(lengths) <= 256
        packed, width = packed + sum(lengths), width + 256 * len(packs)
    assert packed / width > (0.7 if "bucketed" in kind else 0.8)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
def test_an_epoch_takes_every_row_once_and_fills_its_steps(kind):
    plan = build_plan(**KINDS[kind])
    num_steps = plan.num_steps(3)
    steps = [plan.step(number) for number in range(1, num_steps + 1)]
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    for epoch in range(3):
        of_epoch = [step for step in steps if step.epoch == epoch]
        assert sorted(row for step in of_epoch for row in step.rows) == list(range(NUM_ROWS))
        if "tokens" in kind:
            assert max(step.num_tokens for step in of_epoch) <= 1600
            assert sorted(step.num_tokens for step in of_epoch)[1] > 1600 - 220, "except for one, no row more would fit"
        else:
            assert [len(step.rows) for step in of_epoch] == [16] * 12 + [NUM_ROWS - 12 * 16], "the rest comes last"
    for step in steps:
        assert step.num_label_tokens == plan.num_label_tokens[list(step.rows)].sum()
        assert step.num_tokens == plan.num_tokens[list(step.rows)].sum()
    assert plan.step(num_steps + 1).epoch == 3
    assert [plan.step(n) for n in (1, num_steps, 2)] == [steps[0], steps[-1], steps[1]], "asked for in any order"


# 203 rows in batches of 30: an epoch has 7 steps.
@pytest.mark.parametrize(
    ("num_epochs", "num_steps"), [(1, 7), (1.0, 7), (0.5, 4), (2.5, 18), (0.01, 1), (1 / 7, 1), (0.1429, 2), (3, 21), (1e-9, 1)]
)
def test_a_part_of_an_epoch_is_rounded_up_to_whole_steps(num_epochs, num_steps):
    assert build_plan(global_batch_size_rows=30).num_steps(num_epochs) == num_steps


@pytest.mark.parametrize("every_epochs", ["0.1", "0.75", "1.5"])
@pytest.mark.parametrize("kind", KINDS)
def test_due_steps_are_the_lengths_of_as_many_epochs(kind, every_epochs):
    """Of epochs of different lengths too; 0.1 is a tenth, though three times the nearest binary number is more than 0.3."""
    plan, exact = build_plan(**KINDS[kind]), Fraction(every_epochs)
    last = plan.num_steps(3)
    due = [step for step in range(last + 1) if plan.is_due(step, float(every_epochs))]
    assert due == sorted({plan.num_steps(float(k * exact)) for k in range(1, int(3 / exact) + 1)}) and due[-1] == last
    assert all(plan.is_due(step, 1e-9) for step in range(1, last + 1))


def test_a_mix_gives_each_source_its_share():
    mix = Mix(np.array([0] * 10 + [1] * 90), (3.0, 1.0))
    draws = [draw_mix(mix, np.random.Generator(np.random.PCG64(seed))) for seed in (0, 1)]
    for rows in draws:
        counts = np.bincount(rows, minlength=100)
        assert len(rows) == 100 and counts[:10].sum() == 75 and counts[10:].sum() == 25
        assert set(counts[:10]) == {7, 8} and set(counts[10:]) == {0, 1}
    assert sorted(draws[0]) != sorted(draws[1]), "another part of a large source every epoch"


def test_seed_and_epoch_change_the_order():
    plan, other = build_plan(), build_plan(seed=1)
    epochs = ((plan, 0), (plan, plan.steps_per_epoch), (other, 0))
    assert len({tuple(of.step(start + number).rows for number in range(1, 13)) for of, start in epochs}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_steps_come_neither_in_the_order_of_the_rows_nor_of_their_lengths(kind):
    plan = build_plan(**KINDS[kind])
    steps = [list(step.rows) for step in steps_of(plan)[:-1]]  # the rest comes last
    for values in (np.arange(NUM_ROWS), plan.num_tokens):
        means = [values[rows].mean() for rows in steps]
        assert abs(np.corrcoef(means, range(len(steps)))[0, 1]) < 0.7


def test_the_smaller_rest_is_of_any_length():
    plans = [build_plan(seed=seed) for seed in range(8)]
    means = [plan.num_tokens[list(steps_of(plan)[-1].rows)].mean() for plan in plans]
    assert min(means) < plans[0].num_tokens.mean() < max(means)


def test_batches_hold_rows_of_similar_length():
    """Padding to the longest of a batch costs far less than with random batches."""

    def padding(plan: BatchPlan) -> float:
        return sum(len(s.rows) * plan.num_tokens[list(s.rows)].max() for s in steps_of(plan)) / plan.num_tokens.sum()

    assert padding(build_plan()) < 1.35 < padding(build_plan(bucket_by_length=False))


def test_ranks_get_balanced_tokens():
    random = np.random.Generator(np.random.PCG64(1))
    costs = random.integers(1, 500, 64)
    for micro_batch in cut(np.arange(64), costs, num_ranks=4, micro_batch_size_rows=8):
        tokens = [costs[rows].sum() for rows in micro_batch]
        assert max(tokens) / min(tokens) < 1.2


def test_a_rank_without_rows_stays_in_step_and_does_not_count():
    train = TrainConfig(global_batch_size_rows=2, micro_batch_size_rows=1)
    few = BatchPlan(np.array([5, 3, 9]), np.array([1, 2, 3]), train, world_size=2)
    ranks = [few.micro_batches(few.step(2), rank) for rank in range(2)]
    assert [micro.is_dummy for micro_batches in ranks for micro in micro_batches] == [False, True]
    assert ranks[1][0].packs == (few.step(2).rows,) and ranks[1][0].rows == ()


def test_a_batch_that_is_too_small_is_refused():
    few_rows, few_tokens = {"world_size": 8, "global_batch_size_rows": 4}, {"global_batch_size_tokens": 100}
    assert "global_batch_size_rows is 4, smaller than the 8 processes" in refusal(build_plan, **few_rows)
    longest = build_plan().num_tokens.max()
    too_long = f"global_batch_size_tokens is 100, less than the longest row ({longest} tokens)"
    assert too_long in refusal(build_plan, **few_tokens)


def test_a_row_goes_where_it_fits_best():
    # 6 | 5 | then 4 fills 6 to 10, not 5 to 9
    assert pack_best_fit(np.array([4, 6, 5]), 10) == [[1, 0], [2]]
    assert pack_best_fit(np.array([5, 5, 5, 5]), 10) == [[0, 1], [2, 3]]
    assert pack_best_fit(np.array([10, 10]), 10) == [[0], [1]]


def test_the_grid_is_the_coarsest_within_the_bound():
    assert choose_multiples([(8, 512, 64), (8, 256, 64)], (512, 64)) == (64, 64), "nothing is added"
    assert choose_multiples([(8, 500), (8, 508)], (600,)) == (64,), "512 is within 3 %"
    assert choose_multiples([(8, 450), (8, 508)], (600,)) == (24,), "456 and 528 are 2.7 % more, 480 and 512 of 32 are 3.5"
    assert choose_multiples([(8, 460), (8, 490)], (600,)) == (20,)
    assert choose_multiples([(8, 460), (8, 490)], (490,)) == (48,), "no row is longer than 490"
    assert choose_multiples([(8, 5, 3)], (99, 99)) == (1, 1), "every grid adds more"
