"""A cast counts what it rounds, and refuses what its dtype cannot hold."""

from __future__ import annotations

import pytest
import torch

from toolkit.errors import UserError
from toolkit.export.cast import Cast


def test_what_was_rounded_is_counted_over_all_weights() -> None:
    cast = Cast({"first": torch.bfloat16, "second": torch.bfloat16, "exact": torch.float32})
    assert cast("first", torch.tensor([1.0, 1.0 + 2**-10])).tolist() == [1.0, 1.0]
    assert cast("second", torch.tensor([0.5 + 2**-12, torch.inf])).tolist() == [0.5, torch.inf]
    assert cast("exact", torch.ones(4)).dtype == torch.float32
    assert cast.describe() == "rounded 25.0 % of 8 weights, each by at most 9.8e-04 (bfloat16 and float32)"


def test_a_weight_beyond_the_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"^layer.weight has weights up to 7e\+04, more than float16 can hold: take bfloat16$"):
        Cast({"layer.weight": torch.float16})("layer.weight", torch.tensor([1.0, -7e4]))
