"""The key-value store where the ranks of a run meet, and the errors for a rank that cannot reach it.

Under `accelerate launch` and torchrun it is the store of the launcher's agent. Without a launcher, `TOOLKIT_INIT_METHOD` names
it: `env://` (a TCP store of rank 0 at MASTER_ADDR and MASTER_PORT, the default), `tcp://host:port` (the same, in one variable)
or `file:///path` (a file on a disk that all machines share).
"""

from __future__ import annotations

import datetime
import functools
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from toolkit.errors import UserError, refused
from toolkit.variables import INIT_METHOD, given, has_agents_store

POLL_S = 0.02
LINGER_S = 1.0
"""How long rank 0, which may host the store, stays after it has written why the run cannot start. Others wait as much longer."""

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
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
            if not value:
                raise refusal(
                    f"{name} is not set: give the address and a free port of rank 0's machine in MASTER_ADDR and MASTER_PORT, or "
                    f"{INIT_METHOD}=file:///path/on/a/shared/disk"
                )
        method = f"tcp://{f'[{host}]' if ':' in str(host) else host}:{port}"
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
    results: list[dist.Store | Exception] = []

    def run() -> None:
        try:
            results.append(_open_store(meeting))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(meeting.timeout_s + LINGER_S)
    if not results:
        raise refusal(
            f"rank {meeting.rank} of {meeting.world_size} got no answer at {meeting.within()}: check that nothing but rank 0 of "
            "this run listens there, or that the disk of the file answers"
        )
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


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
    hosted_fd = listener.detach() if listener is not None else None
    store = dist.TCPStore(
        host, port, is_master=listener is not None, timeout=timeout, wait_for_workers=False, master_listen_fd=hosted_fd
    )
    if listener is not None:
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
