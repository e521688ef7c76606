"""A part of the launcher's store that belongs to this attempt alone, for ranks that torch elastic may have restarted.

Under `accelerate launch` and torchrun, the ranks find each other through a TCP store that their agent keeps over all attempts.
Torch writes each rank's address there under the same key every time, so a restarted rank that is quicker than its peer reads
the address of a dead process: "Connection refused", or a hang. TORCHELASTIC_RESTART_COUNT cannot tell the attempts apart: it
counts the restarts of one machine, and those that another machine asks for are not counted (pytorch#135712, pytorch#108158).
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

POLL_S = 0.02
PATIENCE = datetime.timedelta(minutes=30)  # as torch's own for gloo; the machines of a restart do not arrive together


def rendezvous_arguments() -> dict[str, Any]:
    """What `init_process_group` needs to connect to ranks of this attempt only; nothing where no store outlives its ranks.

    Collective. To be called once a process.

    Raises:
        RuntimeError: a rank did not come within half an hour.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = next(dist.rendezvous("env://", timeout=PATIENCE))[0]
    attempt = _name_attempt(store, world_size) if rank == 0 else _ask_for_attempt(store, rank)
    return {"store": dist.PrefixStore(attempt, store), "rank": rank, "world_size": world_size}


def _name_attempt(store: dist.Store, world_size: int) -> str:
    """Rank 0: give the attempt a new name, and tell it to every rank that asks until all have said that they know it.

    What a dead rank asked is answered too; nobody reads that. Only a living rank can know the new name.
    """
    attempt = f"attempt-{uuid.uuid4().hex}"
    missing = list(range(1, world_size))
    give_up_at = time.monotonic() + PATIENCE.total_seconds()
    while missing := [rank for rank in missing if not store.check([f"{attempt}/known-to-{rank}"])]:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"ranks {missing} did not come within {PATIENCE}")
        for rank in missing:
            if store.check([f"asked-by-{rank}"]):
                store.set(f"answer-to-{store.get(f'asked-by-{rank}').decode()}", attempt)
        time.sleep(POLL_S)
    return attempt


def _ask_for_attempt(store: dist.Store, rank: int) -> str:
    """Another rank: ask under a name that no earlier attempt can have answered."""
    question = uuid.uuid4().hex
    store.set(f"asked-by-{rank}", question)
    attempt = store.get(f"answer-to-{question}").decode()
    store.set(f"{attempt}/known-to-{rank}", "")
    return attempt
