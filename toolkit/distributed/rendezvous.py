"""The rendezvous: how the ranks of a run find each other, and the errors if they do not.

All ranks first meet in a key-value store, under a name unique to this attempt; only then torch connects them. On its own, torch
does not name the missing rank, and some of its waits have no timeout. Also, a store outlives its ranks: a launcher's agent keeps
it over all attempts, and a file remains after a crash. Torch writes each rank's address there under the same key every time, so a
restarted rank that is faster than its peer reads the address of a dead process ("Connection refused", or a hang).
TORCHELASTIC_RESTART_COUNT cannot distinguish the attempts: it counts the restarts of one machine, not those that another machine
asks for (pytorch#135712, pytorch#108158).

Under `accelerate launch` and torchrun the store is that of the launcher's agent. Without a launcher, `TOOLKIT_INIT_METHOD` names
it: `env://` (a TCP store of rank 0 at MASTER_ADDR and MASTER_PORT, the default), `tcp://host:port` (the same, in one variable)
or `file:///path` (a file on a disk that all machines share).
"""

import datetime
import functools
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from toolkit.errors import UserError, first_of, refused
from toolkit.private import GLOO
from toolkit.variables import INIT_METHOD, given, has_agents_store

POLL_S = 0.02
LINGER_S = 1.0
"""How long rank 0, which may host the store, stays after it has written why the run cannot start. Others wait as much longer."""
ALL_ARE_HERE = "all are here"

refusal = functools.partial(UserError, printed_by="rank")
_hosted: dict[str, dist.Store] = {}
"""Stores of this process, by address. They stay until it ends: the ranks of its next run meet there too."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet, how many they are, and until when they wait."""

    address: str
    """As a user writes it, tcp://host:port or file:///path; for an agent's store, its address."""
    of_agent: bool
    rank: int
    world_size: int
    timeout_s: float
    give_up_at: float
    """Deadline on the clock of `time.monotonic`."""

    def over(self, grace_s: float = 0) -> bool:
        return time.monotonic() > self.give_up_at + grace_s

    def within(self) -> str:
        return f"{self.address} within {self.timeout_s:g} s (run.timeout_s)"


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


def find_meeting(timeout_s: float) -> Meeting | None:
    """Read the meeting from the environment; None for one process. A variable that is missing or contradicts another is a
    `UserError`."""
    if given("WORLD_SIZE") is None and given("RANK") is None:
        return None
    world_size = _number_from_environment("WORLD_SIZE", least=1)
    if world_size == 1:
        return None
    rank = _number_from_environment("RANK")
    if rank >= world_size:
        raise refusal(f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks go from 0 to {world_size - 1}")
    of_agent = has_agents_store()
    method = given(INIT_METHOD) or "env://"
    if of_agent and method != "env://":
        raise refusal(f"{INIT_METHOD} is {method}, but these ranks meet in the store of their launcher: leave it out")
    if method == "env://":
        host, port = given("MASTER_ADDR"), given("MASTER_PORT")
        if not host or not port:
            raise refusal(
                f"{'MASTER_PORT' if host else 'MASTER_ADDR'} is not set: give the address and a free port of rank 0's machine in "
                f"MASTER_ADDR and MASTER_PORT, or {INIT_METHOD}=file:///path/on/a/shared/disk"
            )
        method = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return Meeting(method, of_agent, rank, world_size, timeout_s, time.monotonic() + timeout_s)


def _number_from_environment(name: str, least: int = 0) -> int:
    """A whole number, of `least` or more, from an environment variable."""
    text = given(name)
    if text is None or not text.isdecimal() or int(text) < least:
        what = "is not set" if text is None else f"is {text!r}"
        raise refusal(f"{name} {what}: every rank needs RANK (from 0) and WORLD_SIZE, as a launcher sets them")
    return int(text)


def open_store(meeting: Meeting) -> dist.Store:
    """Connect to the store; rank 0 hosts it, unless it is a file's or an agent's. If nobody answers within `meeting.timeout_s`
    and a few seconds, that is a `UserError`.

    This runs in a thread, because torch may never return from a port of another service or a file on a hung disk.
    """
    opened = Future[dist.Store]()

    def run() -> None:
        try:
            opened.set_result(_open_store(meeting))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([opened], meeting.timeout_s + LINGER_S).done:
        raise refusal(
            f"rank {meeting.rank} of {meeting.world_size} got no answer at {meeting.within()}: check that nothing but rank 0 of "
            "this run listens there, or that the disk of the file answers"
        )
    return opened.result()


def _open_store(meeting: Meeting) -> dist.Store:
    address, timeout = meeting.address, datetime.timedelta(seconds=meeting.timeout_s)
    if meeting.of_agent:
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    if address.startswith("file://"):
        path = Path(address.removeprefix("file://"))
        try:
            if not path.is_absolute() or not path.parent.is_dir() or path.is_dir():
                raise refusal(f"{INIT_METHOD} is {address}: write file:///folder/name, in a folder that exists on every machine")
            path.open("ab").close()
        except OSError as error:
            raise refusal(f"{INIT_METHOD} is {address}, which cannot be written ({error.strerror})") from None
        store: dist.Store = dist.FileStore(str(path), -1)  # with a number of ranks, it would count those of a crash and refuse
        store.check(["anything"])  # reads the file, to fail here
        return store
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is not between 0 and 65535
        host, port = None, None
    if not host or not port or not address.startswith("tcp://"):
        raise refusal(
            f"the ranks cannot meet at {address}: write tcp://host:port, file:///path or env:// (MASTER_ADDR, MASTER_PORT)"
        )
    if address in _hosted:
        return _hosted[address]
    listener = _listen(port) if meeting.rank == 0 else None
    _reach(host, port, meeting)
    hosts, fd = listener is not None, None if listener is None else listener.detach()
    store = dist.TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)
    if hosts:
        _hosted[address] = store
    return store


def _listen(port: int) -> socket.socket:
    """Open rank 0's server socket, on all network devices of its machine."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)
    except OSError as error:
        if refused(error):
            raise
        raise refusal(
            f"rank 0 cannot listen on port {port} ({error.strerror}): take another one, or end the run that holds it; "
            "if it is this one, two of its processes have RANK 0"
        ) from None


def _reach(host: str, port: int, meeting: Meeting) -> None:
    """Wait until the port answers, without torch's warnings."""
    reason = "no answer"
    while not meeting.over():
        try:
            socket.create_connection((host, port), timeout=min(5.0, meeting.timeout_s)).close()
            return
        except OSError as error:
            if refused(error):
                raise
            reason = error.strerror or str(error)
        except UnicodeError:
            raise refusal(f"the ranks cannot meet at {meeting.address}: that is not the name of a host") from None
        time.sleep(POLL_S * 10)
    raise refusal(
        f"rank {meeting.rank} of {meeting.world_size} found nobody at {meeting.within()}: {reason}; check that this is the "
        "address of rank 0's machine, that rank 0 was started, and that no firewall closes the port"
    )
