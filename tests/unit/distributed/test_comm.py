"""What ranks agree on, and what the groups of a run change in torch."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest
import torch.distributed as dist

from toolkit.distributed import comm
from toolkit.distributed.comm import close_groups, limit_groups, raise_together
from toolkit.errors import UserError
from toolkit.models.safetensors_index import WholeOnly


def test_torchs_own_timeouts_return_when_the_groups_of_a_run_are_closed() -> None:
    c10d: Any = dist.distributed_c10d
    of_torch = dist.constants.default_pg_timeout, dist.constants.default_pg_nccl_timeout
    limit_groups(datetime.timedelta(seconds=7))
    assert c10d.default_pg_timeout.total_seconds() == 7
    close_groups()
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == of_torch


def test_ranks_agree_on_an_error_whose_class_only_one_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file of rows is loaded on one rank of a machine."""

    class OfTheirs(UserError):
        pass

    monkeypatch.setattr(comm, "gather_objects", lambda value: [None, pickle.loads(pickle.dumps(value))])
    for error, kind in ((OfTheirs("row 3 has no title"), UserError), (WholeOnly("it is quantized"), WholeOnly)):
        with pytest.raises(UserError, match=f"^{error}$") as raised:
            raise_together(error)
        assert type(raised.value) is kind and raised.value.printed_by == "run"
