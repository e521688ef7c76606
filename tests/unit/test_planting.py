"""A planted fault still finds the code that it changes. `tests/distributed/test_planted_faults.py` shows that it is caught."""

import pytest

from tests.planting.faults import FAULTS
from tests.planting.plant import planted


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_its_code(name):
    with planted(name):
        pass
