"""The sentence that a user's mistake is refused with."""

from collections.abc import Callable

import pytest

from toolkit.errors import UserError


def refusal(call: Callable, *args, **settings) -> str:
    """What a call says that must be refused: one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)
