"""What ranks agree on."""

from __future__ import annotations

import pickle

import pytest

from toolkit.distributed import comm
from toolkit.distributed.comm import raise_together
from toolkit.errors import UserError
from toolkit.models.safetensors_index import WholeOnly


def test_ranks_agree_on_an_error_whose_class_only_one_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file of rows is loaded on one rank of a machine."""

    class OfTheirs(UserError):
        pass

    monkeypatch.setattr(comm, "gather_objects", lambda value: [None, pickle.loads(pickle.dumps(value))])
    for error, kind in ((OfTheirs("row 3 has no title"), UserError), (WholeOnly("it is quantized"), WholeOnly)):
        with pytest.raises(UserError, match=f"^{error}$") as raised:
            raise_together(error)
        assert type(raised.value) is kind and raised.value.printed_by == "run"
