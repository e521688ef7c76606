"""What ranks agree on."""

import pickle
from unittest.mock import Mock

import pytest

from toolkit.distributed import comm
from toolkit.distributed.comm import on_all_ranks
from toolkit.errors import UserError
from toolkit.models.safetensors_index import ShardedReadUnsupported


def test_ranks_agree_on_the_first_error_with_its_class_unless_only_one_of_them_has_it(monkeypatch):
    """A user's file of rows, and a class in it, is loaded on one rank of a machine."""

    class OfTheirs(UserError):
        pass

    def gather(value) -> list:
        return [None, pickle.loads(pickle.dumps(value)), UserError("b is 4")]

    monkeypatch.setattr(comm, "gather_objects", gather)
    of_ours = ShardedReadUnsupported("it is quantized", "rank")
    for error, kind in ((OfTheirs("row 3 has no title"), UserError), (of_ours, ShardedReadUnsupported)):
        with pytest.raises(UserError, match=f"^{error}$") as raised:
            on_all_ranks(Mock(side_effect=error))
        assert type(raised.value) is kind and raised.value.printed_by == "run"
