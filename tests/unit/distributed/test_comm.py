"""What the groups of a run change in torch ends with them."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from toolkit.distributed.comm import close_groups, limit_groups


def test_torchs_own_timeouts_return_when_the_groups_of_a_run_are_closed() -> None:
    c10d: Any = dist.distributed_c10d
    of_torch = dist.constants.default_pg_timeout, dist.constants.default_pg_nccl_timeout
    limit_groups(datetime.timedelta(seconds=7))
    assert c10d.default_pg_timeout.total_seconds() == 7
    close_groups()
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == of_torch
