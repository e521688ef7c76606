"""What is done within `random_state_kept` leaves every generator as it was."""

import contextlib
import random

import numpy as np
import torch

from toolkit.distributed.rng import random_state_kept


def test_draws_within_are_not_seen_after_it_however_it_ends() -> None:
    for ends_by in (None, ValueError):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        expected = [random.random(), np.random.random(), torch.rand(()).item()]
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        with contextlib.suppress(ValueError), random_state_kept():
            assert [random.random(), np.random.random(), torch.rand(()).item()] == expected
            if ends_by is not None:
                raise ends_by
        assert [random.random(), np.random.random(), torch.rand(()).item()] == expected
