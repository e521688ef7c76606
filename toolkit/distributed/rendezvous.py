"""The rendezvous: how the ranks of a run find each other, and the errors if they do not.

All ranks first meet in a store, under a name unique to this attempt; only then torch connects them. On its own, torch does not
name the missing rank, and some of its waits have no timeout. Also, a store outlives its ranks: a launcher's agent keeps it over
all attempts, and a file remains after a crash. Torch writes each rank's address there under the same key every time, so a
restarted rank that is faster than its peer reads the address of a dead process ("Connection refused", or a hang).
TORCHELASTIC_RESTART_COUNT cannot distinguish the attempts: it counts the restarts of one machine, not those that another machine
asks for (pytorch#135712, pytorch#108158).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from toolkit.distributed.store import LINGER_S, POLL_S, Meeting, find_meeting, open_store, refusal
from toolkit.errors import first_of, refused
from toolkit.private import GLOO

ALL_ARE_HERE = "all are here"


def rendezvous_arguments(timeout_s: float) -> dict[str, Any]:
    """Arguments for `init_process_group` that connect the ranks of this attempt only; empty for one process. Collective, called
    once. Ranks that are missing after `timeout_s` and a few seconds are a `UserError` on every rank that came; it names the
    address, the missing ranks and what to check."""
    meeting = find_meeting(timeout_s)
    if meeting is None:
        return {}
    try:
        store = open_store(meeting)
        attempt = _name_attempt(store, meeting) if meeting.rank == 0 else _ask_for_attempt(store, meeting)
    except dist.DistError as error:
        if refused(error):
            raise
        first_line = str(error).splitlines()[0]
        raise refusal(
            f"rank {meeting.rank} of {meeting.world_size} lost the others at {meeting.address} before all were connected "
            f"({first_line}): see rank 0's error"
        ) from None
    return {"store": dist.PrefixStore(attempt, store), "rank": meeting.rank, "world_size": meeting.world_size}


@contextmanager
def connecting() -> Iterator[None]:
    """Wrap torch's part of the rendezvous: for ranks that have met but cannot connect to each other, a `UserError` quotes
    torch."""
    try:
        yield
    except RuntimeError as error:
        if refused(error) or not is_connection_error(error):
            raise
        text = str(error).splitlines()[0]
        time.sleep(LINGER_S)  # others may still be reading from the store of rank 0
        raise refusal(
            f"the ranks have met, but cannot connect to each other ({text}): name the network device between the machines in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and open its ports"
        ) from None


def is_connection_error(error: Exception) -> bool:
    """Whether torch lost another rank or never reached it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and GLOO in str(error))


def _name_attempt(store: dist.Store, meeting: Meeting) -> str:
    """Rank 0: choose a new name for the attempt, and send it to every rank that asks until all have confirmed it.

    Questions of dead ranks are answered too, but nobody reads those answers: only a living rank can know the new name.
    """
    attempt = f"attempt-{uuid.uuid4().hex}"
    missing, world_size_of, sentence = list(range(1, meeting.world_size)), {}, ""
    while missing and not sentence:
        # Answer those who ask.
        for rank in missing:
            if store.check([f"asked-by-{rank}"]):
                question, world_size = store.get(f"asked-by-{rank}").decode().split()
                world_size_of[rank] = int(world_size)
                store.set(f"answer-to-{question}", f"{attempt} {meeting.world_size}")
        time.sleep(POLL_S)

        # See who has confirmed, and whether anything forbids the attempt.
        missing = _missing(store, attempt, missing)
        wrong = [rank for rank, other in world_size_of.items() if rank not in missing and other != meeting.world_size]
        if wrong:
            sentence = _other_world_size(meeting, wrong[0], world_size_of[wrong[0]], meeting.world_size)
        elif missing and meeting.over():
            sentence = _who_is_missing(meeting, missing)
    store.set(f"{attempt}/verdict", sentence or ALL_ARE_HERE)
    if sentence:
        time.sleep(LINGER_S)
        raise refusal(sentence)
    return attempt


def _ask_for_attempt(store: dist.Store, meeting: Meeting) -> str:
    """Any other rank: ask under a key that no earlier attempt can have answered, and wait until all ranks have met."""
    # Ask rank 0 for the attempt's name.
    question = uuid.uuid4().hex
    store.set(f"asked-by-{meeting.rank}", f"{question} {meeting.world_size}")
    while not store.check([f"answer-to-{question}"]):
        if meeting.over():
            raise refusal(
                f"rank 0 did not answer rank {meeting.rank} of {meeting.world_size} at {meeting.within()}: check that it was "
                f"started with this address and WORLD_SIZE, and no other process with RANK {meeting.rank}"
            )
        time.sleep(POLL_S)

    # Confirm it, and wait for rank 0's verdict.
    attempt, world_size = store.get(f"answer-to-{question}").decode().split()
    store.set(f"{attempt}/known-to-{meeting.rank}", "")
    if int(world_size) != meeting.world_size:
        raise refusal(_other_world_size(meeting, meeting.rank, meeting.world_size, int(world_size)))
    while not store.check([f"{attempt}/verdict"]):
        if meeting.over(LINGER_S):
            raise refusal(_who_is_missing(meeting, _missing(store, attempt, list(range(1, meeting.world_size)))))
        time.sleep(POLL_S)
    if (verdict := store.get(f"{attempt}/verdict").decode()) != ALL_ARE_HERE:
        raise refusal(verdict)
    return attempt


def _missing(store: dist.Store, attempt: str, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([f"{attempt}/known-to-{rank}"])]


def _who_is_missing(meeting: Meeting, missing: list[int]) -> str:
    size = meeting.world_size
    return (
        f"only {size - len(missing)} of {size} ranks came to {meeting.within()}, missing: {first_of(missing)}; "
        "check that each was started with this address, the same WORLD_SIZE and a RANK of its own"
    )


def _other_world_size(meeting: Meeting, rank: int, theirs: int, ours: int) -> str:
    return f"at {meeting.address} rank {rank} was started with WORLD_SIZE {theirs}, rank 0 with {ours}: give all the same"
