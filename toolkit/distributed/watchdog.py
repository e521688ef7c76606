"""Ends a run that hangs: every rank prints its stacks and exits, and the message names the rank that did not arrive.

The main thread reports where it is, by `enter_phase`. In work that goes step by step, each call of it or of `heartbeat` is
progress. Ahead of library calls that report nothing (tokenizing, loading, writing), it says that CPU time counts: there, CPU time
or IO of the process and its children is progress (`toolkit.distributed.activity`). Long work that makes progress is never ended.
Where work communicates over the device, CPU time must not count, because a host that waits for a GPU takes a full core too.

Two more threads keep watch. One reports the rank's place to the key-value store of the process group about once a second. When
this rank has been idle for half of `timeout_s`, it also reads the places of the others. It may itself hang, with the host of the
store. The other thread talks to nobody, keeps the time and ends the process.

A job hangs when none of its answering ranks makes progress for `timeout_s`: waiting for a slow rank is not a hang. The first rank
that sees the hang writes the sentence into the store, so that all print the same one; `toolkit.distributed.rank_status` finds the
ranks that did not arrive. If a thread holds the GIL forever, the watchdog of that process is blocked too: the other ranks name
it, and the launcher has to kill it.

A rank that dies is named too. gloo reports its end at once, in the collective that waits for it; so it does under nccl, where
ranks agree over gloo after each step, unless nccl's own thread aborts the process before.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.distributed.activity import MIN_IO_BYTES_PER_S, Activity
from toolkit.distributed.comm import rank, world_size
from toolkit.distributed.rank_status import (
    ANSWER_S,
    LOOK_S,
    Peers,
    Place,
    Verdict,
    explain,
    hang_file,
    line_of_main_thread,
    named,
    num_collectives,
    store_bytes_per_s,
)
from toolkit.distributed.rendezvous import LINGER_S, is_connection_error
from toolkit.errors import EXIT_HANG, RankLost
from toolkit.private import private

WINDOW_S = 30.0
"""Longest time between two looks at the process's own activity."""
STDERR = 2
"""The file descriptor is used because a hung thread may hold the lock of `sys.stderr`."""

_Where = tuple[str, int | None, bool]
"""Phase, step, and whether the process's own activity counts."""
_current: Watchdog | None = None
"""The one that ends this process. Any code may report its progress, however far from the run."""


def start(timeout_s: float) -> None:
    """Watch this process from here until `stop` or its end. Every rank of a run must call it, but it is not a collective."""
    global _current
    stop(has_finished=False)
    _current = Watchdog(timeout_s).__enter__()
    atexit.register(stop, has_finished=False)  # no thread may be inside the store while Python finalizes


def stop(*, has_finished: bool = True) -> None:
    """Stop watching. If the run `has_finished`, no rank waits for this one."""
    global _current
    watchdog, _current = _current, None
    atexit.unregister(stop)
    if watchdog is not None:
        watchdog.has_left = has_finished
        watchdog.__exit__()


def keep_stacks_in(folder: Path) -> None:
    """From now on also write the stacks to files in the run's folder."""
    if _current is not None:
        _current.folder = folder


def enter_phase(phase: str, step: int | None = None, *, counts_cpu: bool = False) -> None:
    """As `Watchdog.enter_phase` of the process's watchdog, if there is one."""
    if _current is not None:
        _current.enter_phase(phase, step, counts_cpu=counts_cpu)


def heartbeat() -> None:
    """Report progress at the same place."""
    if _current is not None:
        _current._here = (*_current._here,)  # a new object, as in `Watchdog.enter_phase`


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Wrap what communicates. A rank that loses another one raises `RankLost`, and its traceback goes into the run folder."""
    try:
        yield
    except Exception as error:
        if world_size() == 1 or not is_connection_error(error):
            raise
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch elastic sends it now, and kills after 30 s
        time.sleep(0.2)  # a dying process closes its sockets one by one; and in a hang, the watchdog ends this process too
        try:
            store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            server = private("_underlying_non_prefix_store", store)
            if isinstance(server, dist.TCPStore):  # torch would warn in 20 lines, and try again until the timeout
                socket.create_connection((server.host, server.port), timeout=ANSWER_S).close()
            store.set_timeout(datetime.timedelta(seconds=ANSWER_S))
            gone, speaks = Peers(store, rank(), world_size()).find_gone()
            who = named(gone) if gone else ""
        except (dist.DistError, OSError):
            who, speaks = "rank 0 or the launcher of its machine", True  # one of them hosts the store
        if not who:
            raise
        if _current is not None and _current.folder is not None:
            with suppress(OSError):
                (_current.folder / f"lost-rank-{rank():05d}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        if rank() == 0:
            time.sleep(LINGER_S)  # others may still be reading from the store of rank 0
        sentence = f"error: lost {who} (killed, failed, or the machine is off): the same command goes on from the last checkpoint"
        raise RankLost(sentence if speaks else 1) from error


class Watchdog:
    """A context that ends the process with exit code `EXIT_HANG` once the job has made no progress for `timeout_s`. A rank's
    stacks go to its stderr and, if the folder is known, to `hang-rank-<rank>.txt` in it."""

    def __init__(self, timeout_s: float, folder: Path | None = None) -> None:
        self.timeout_s, self.folder, self.has_left = timeout_s, folder, False
        self._interval_s = min(1.0, timeout_s / 10)
        self._patience_s = max(ANSWER_S, timeout_s / 2)
        self._here: _Where = ("start", None, True)
        self._idle_s = 0.0
        self._last_answer_s = 0.0
        self._cpu_s_of_peers = 0.0
        self._verdict: Verdict | None = None
        self._threads: list[threading.Thread] = []
        self._stopped, self._shown, self._seen_by_all = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Watchdog:
        # Stored here because the process group may end before its watchdog.
        self._rank, self._world_size = rank(), world_size()
        num_collectives()  # a torch without these counters is refused here, and not in a thread
        # The launcher hosts the store, or rank 0: its reads and writes are not work of the run.
        look_s = min(LOOK_S, self.timeout_s / 10)
        of_store = store_bytes_per_s(self._world_size, self._interval_s, look_s) if self._rank == 0 else 0
        self._activity = Activity(min(WINDOW_S, self.timeout_s / 5), MIN_IO_BYTES_PER_S + of_store)
        self._threads = [threading.Thread(target=self._keep_time, name="watchdog", daemon=True)]
        if self._world_size > 1:
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            self._threads.append(threading.Thread(target=self._ask_peers, args=(store,), name="watchdog peers", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=1)  # a thread that hangs with the store is abandoned

    def enter_phase(self, phase: str, step: int | None = None, *, counts_cpu: bool = False) -> None:
        """Report that the main thread is in `phase` of `step`, and restart the clock. No collective; costs almost nothing."""
        self._here = (phase, step, counts_cpu)  # a new object at every call, by which the other thread sees progress

    def _keep_time(self) -> None:
        seen, last_s = self._here, time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now_s, here = time.monotonic(), self._here
            # A process that was suspended and continues has not hung meanwhile, so its pause counts as at most one interval.
            stood_s = min(now_s - last_s, self._interval_s + 1)
            cpu_s = time.thread_time() + self._cpu_s_of_peers
            has_moved = here is not seen
            if has_moved and here[2]:
                self._activity.restart(cpu_s)
            elif here[2]:
                has_moved = self._activity.has_worked(cpu_s)
            self._idle_s = 0.0 if has_moved else self._idle_s + stood_s
            seen, last_s = here, now_s
            is_cut_off = now_s - self._last_answer_s > max(2 * ANSWER_S, self.timeout_s / 2)
            if self._verdict is not None:
                self._end(self._verdict)
            elif self._idle_s < self.timeout_s / 2:
                self._last_answer_s = now_s
            elif self._idle_s >= self.timeout_s and (self._world_size == 1 or is_cut_off):
                sentence = explain({self._rank: self._place()}, set(), self.timeout_s, self.folder)
                if self._world_size > 1:
                    sentence += " The other ranks cannot be asked: the key-value store on the first node does not answer."
                self._end(Verdict(sentence, []))

    def _ask_peers(self, store: dist.Store) -> None:
        peers: Peers | None = None
        wait_s = 0.0  # the first report comes at once: a rank may be lost in its first second
        while not self._stopped.wait(wait_s) and self._verdict is None:
            wait_s = self._interval_s
            try:
                peers = peers or Peers(store, self._rank, self._world_size)
                place = self._place()
                peers.publish(place)
                if place.idle_s < self.timeout_s / 2:
                    peers.clear()
                else:
                    self._verdict = peers.poll(self.timeout_s, self._patience_s, self.folder)
                self._last_answer_s = time.monotonic()
            except dist.DistError:
                # An answer may still be under way on this connection, so the next try opens a new one. If the store never
                # answers, `_keep_time` notices it and ends this rank alone.
                peers = None
            self._cpu_s_of_peers = time.thread_time()
        with suppress(dist.DistError):
            if peers is not None and self._verdict is not None:
                self._shown.wait()
                peers.wait_until_shown(self._verdict)
            elif peers is not None and self.has_left:
                peers.publish(self._place())
        self._seen_by_all.set()

    def _place(self) -> Place:
        (phase, step, _), idle_s = self._here, self._idle_s
        if idle_s < self.timeout_s / 2:
            return Place(phase, step, idle_s, beat=time.time_ns(), has_left=self.has_left)
        return Place(phase, step, idle_s, line_of_main_thread(), num_collectives(), time.time_ns(), self.has_left)

    def _end(self, verdict: Verdict) -> None:
        if self._stopped.is_set():
            return
        # If anything below hangs too (a full pipe, a dead file system), the process still ends, with exit code 1.
        faulthandler.dump_traceback_later(4 * ANSWER_S, exit=True, file=STDERR)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        with suppress(OSError):  # nobody may read it any more
            os.write(STDERR, f"{verdict.sentence}\n".encode())
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed
            with suppress(OSError), hang_file(self.folder, self._rank).open("w", encoding="utf-8") as file:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), verdict.sentence, sep="\n", flush=True, file=file)
                faulthandler.dump_traceback(file=file, all_threads=True)
        self._shown.set()
        if verdict.answering:
            # Wait for the others: a launcher ends all ranks soon after the first exit, and the store may end with rank 0.
            self._seen_by_all.wait(ANSWER_S)
        sys.stdout.flush()
        os._exit(EXIT_HANG)
