"""The grid of lengths that a run chooses: its padding, and how soon the shapes of an epoch have all been there."""

from __future__ import annotations

import pytest

from benchmarks.plan.new_shapes import ROWS, Rows, measure
from toolkit.data.collate import MOST_PADDING, choose_multiples


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_the_grid_adds_little_padding_and_few_shapes_are_new_after_a_quarter_of_an_epoch(rows: Rows) -> None:
    _, before, after = measure(rows)
    assert after.padding_share <= MOST_PADDING
    assert sum(after.new_shares[1:]) / 3 <= 0.05 < sum(before.new_shares[1:]) / 3


def test_the_grid_is_the_coarsest_within_the_bound() -> None:
    assert choose_multiples([(8, 512, 64), (8, 256, 64)], (512, 64)) == (64, 64), "nothing is added"
    assert choose_multiples([(8, 500), (8, 508)], (600,)) == (64,), "512 is within 3 %"
    assert choose_multiples([(8, 450), (8, 508)], (600,)) == (24,), "456 and 528 are 2.7 % more, 480 and 512 of 32 are 3.5"
    assert choose_multiples([(8, 460), (8, 490)], (600,)) == (20,)
    assert choose_multiples([(8, 460), (8, 490)], (490,)) == (48,), "no row is longer than 490"
    assert choose_multiples([(8, 5, 3)], (99, 99)) == (1, 1), "every grid adds more"
