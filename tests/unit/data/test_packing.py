"""Best-fit decreasing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.data.packing import pack_best_fit


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_every_row_is_in_one_pack_that_holds_it(seed: int, num_rows: int) -> None:
    lengths = np.random.Generator(np.random.PCG64(seed)).integers(1, 101, num_rows)
    packs = pack_best_fit(lengths, 100)
    assert sorted(place for pack in packs for place in pack) == list(range(num_rows))
    assert all(lengths[pack].sum() <= 100 for pack in packs)
    assert len(packs) <= 11 / 9 * math.ceil(lengths.sum() / 100) + 1


def test_a_row_goes_where_it_fits_best() -> None:
    # 6 | 5 | then 4 fills 6 to 10, not 5 to 9
    assert pack_best_fit(np.array([4, 6, 5]), 10) == [[1, 0], [2]]
    assert pack_best_fit(np.array([5, 5, 5, 5]), 10) == [[0, 1], [2, 3]]
    assert pack_best_fit(np.array([10, 10]), 10) == [[0], [1]]
