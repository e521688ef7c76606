"""The end of a run that no longer moves: every rank shows its stacks and exits, and the rank that did not arrive is named.

The main thread says with `Watchdog.at` where it is. Two threads beside it keep watch. One tells the rank's place to the
key-value store of the process group about once a second and, when this rank has stood still for `timeout_s`, reads the places
of the others; it may hang itself, with the host of the store. The other talks to nobody, keeps the time and ends the process.

A job hangs when none of its ranks that answer has moved for `timeout_s`: waiting for a slow rank is no hang. The first rank to
see it writes the sentence into the store, so that all say the same.

Who did not arrive: a rank that does not answer (stopped or cut off); else one that has issued fewer collectives than a peer in
some process group and more in none; else one in the earliest step. Where a thread holds the GIL for ever, these threads stand
still too: the others name that rank, and the launcher has to kill it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from toolkit.distributed import rank, world_size
from toolkit.errors import EXIT_HANG

ANSWER_S = 5.0
"""How long a rank is waited for before it counts as one that does not answer."""
STDERR = 2
"""The file descriptor: a hung thread may hold the lock of `sys.stderr`."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands, in its own words."""

    phase: str
    step: int
    idle_s: float
    """Seconds since it last moved."""
    line: str = ""
    """Of its main thread's innermost Python frame; told once the rank has stood still too long."""
    num_collectives: dict[str, int] = field(default_factory=dict)
    """Issued so far, by process group and device; told as `line` is."""
    beat: int = 0
    """Differs between any two tellings."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks print before they exit."""

    sentence: str
    answering: list[int]
    """Ranks that will print it."""


class Watchdog:
    """Ends the process with exit code `EXIT_HANG` once the job has stood still for `timeout_s`; at work inside its `with`.

    Args:
        folder: the stacks of a rank go to its stderr and to `hang-rank-<rank>.txt` in here.
    """

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self.timeout_s, self.folder = timeout_s, folder
        self._interval_s = min(1.0, timeout_s / 10)
        self._here = ("start", 0)
        self._idle_s = 0.0
        self._peers: _Peers | None = None
        self._last_answer_s = 0.0
        self._verdict: Verdict | None = None
        self._threads: list[threading.Thread] = []
        self._stopped, self._shown, self._seen_by_all = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Watchdog:
        self._threads = [threading.Thread(target=self._keep_time, name="watchdog", daemon=True)]
        if world_size() > 1:
            self._peers = _Peers()
            self._threads.append(
                threading.Thread(target=self._ask_peers, args=(self._peers,), name="watchdog peers", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=1)  # one that hangs with the store is left behind

    def at(self, phase: str, step: int) -> None:
        """The main thread is in `phase` of `step` now; restarts the clock. No collective; costs next to nothing."""
        self._here = (phase, step)  # a new object at every call: the other thread sees that this one moved

    def _keep_time(self) -> None:
        seen, last_s = self._here, time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now_s, here = time.monotonic(), self._here
            # A process that was stopped and goes on (a suspended job) has not hung meanwhile: its own standstill counts little.
            self._idle_s = self._idle_s + min(now_s - last_s, self._interval_s + 1) if here is seen else 0.0
            seen, last_s = here, now_s
            if self._verdict is not None:
                self._end(self._verdict)
            elif self._idle_s < self.timeout_s:
                self._last_answer_s = now_s
            elif self._peers is None or now_s - self._last_answer_s > 2 * ANSWER_S:
                sentence = explain({rank(): self._place()}, set(), self.timeout_s, self.folder)
                if self._peers is not None:
                    sentence += " The other ranks cannot be asked: the key-value store on the first node does not answer."
                self._end(Verdict(sentence, []))

    def _ask_peers(self, peers: _Peers) -> None:
        # Whatever the store's end raises, this rank can only go on alone: `_keep_time` sees that no answer comes.
        with suppress(dist.DistError):
            while not self._stopped.wait(self._interval_s):
                place = self._place()
                peers.tell(place)
                if place.idle_s < self.timeout_s:
                    peers.forget()
                else:
                    self._verdict = peers.look(self.timeout_s, self.folder)
                self._last_answer_s = time.monotonic()
                if self._verdict is not None:
                    self._shown.wait()
                    peers.wait_until_shown(self._verdict)
                    break
        self._seen_by_all.set()

    def _place(self) -> Place:
        (phase, step), idle_s = self._here, self._idle_s
        if idle_s < self.timeout_s:
            return Place(phase, step, idle_s, beat=time.time_ns())
        return Place(phase, step, idle_s, _line_of_main_thread(), _num_collectives(), time.time_ns())

    def _end(self, verdict: Verdict) -> None:
        if self._stopped.is_set():
            return
        # Should anything below hang in its turn (a full pipe, a dead file system), the process still ends, with exit code 1.
        faulthandler.dump_traceback_later(4 * ANSWER_S, exit=True, file=STDERR)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os.write(STDERR, f"{verdict.sentence}\n".encode())
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        with suppress(OSError), hang_file(self.folder, rank()).open("w", encoding="utf-8") as file:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), verdict.sentence, sep="\n", flush=True, file=file)
            faulthandler.dump_traceback(file=file, all_threads=True)
        self._shown.set()
        if verdict.answering:
            # A launcher ends all ranks soon after the first has ended, and with rank 0 the store may end: nobody leaves early.
            self._seen_by_all.wait(ANSWER_S)
        sys.stdout.flush()
        os._exit(EXIT_HANG)


class _Peers:
    """A rank's view of the others, through a connection to the store of its own: the main thread may wait in its one."""

    def __init__(self) -> None:
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        # The group's store is of this attempt alone (`toolkit.process_group`): no verdict of an earlier one is found.
        self._store = dist.PrefixStore("watchdog", store)
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._keys = [f"place/{number}" for number in range(world_size())]
        self._first_look: tuple[float, dict[int, Place]] | None = None

    def tell(self, place: Place) -> None:
        """Tell the others where this rank stands."""
        self._store.set(self._keys[rank()], json.dumps(asdict(place)))

    def forget(self) -> None:
        """The job moves: the next `look` is a first one."""
        self._first_look = None

    def look(self, timeout_s: float, folder: Path) -> Verdict | None:
        """The verdict, if the job hangs; None while it may still move."""
        if self._store.check(["verdict"]):
            return Verdict(**json.loads(self._store.get("verdict")))
        now_s, places = time.monotonic(), self._places()
        if self._first_look is None:
            self._first_look = (now_s, places)
            return None
        first_look_s, before = self._first_look
        answering = {number: place for number, place in places.items() if place != before.get(number)}
        if len(answering) < len(self._keys) and now_s - first_look_s < ANSWER_S:
            return None
        if any(place.idle_s < timeout_s for place in answering.values()):
            self.forget()
            return None
        silent = set(range(len(self._keys))) - set(answering)
        verdict = Verdict(explain(places, silent, timeout_s, folder), sorted(answering))
        return Verdict(**json.loads(self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))))

    def wait_until_shown(self, verdict: Verdict) -> None:
        """Return once every rank that answers has written its stacks. A rank outside `answering` that came back waits too."""
        num_shown = self._store.add("shown", 1)
        while num_shown < len(verdict.answering):
            time.sleep(0.05)
            num_shown = self._store.add("shown", 0)

    def _places(self) -> dict[int, Place]:
        """By rank, of those that have ever told."""
        told = list(range(len(self._keys)))
        if not self._store.check(self._keys):
            told = [number for number in told if self._store.check([self._keys[number]])]
        values = self._store.multi_get([self._keys[number] for number in told])
        return {number: Place(**json.loads(value)) for number, value in zip(told, values, strict=True)}


def hang_file(folder: Path, number: int) -> Path:
    """Where rank `number` leaves its stacks."""
    return folder / f"hang-rank-{number:05d}.txt"


def explain(places: dict[int, Place], silent: set[int], timeout_s: float, folder: Path) -> str:
    """The sentence for the user.

    Args:
        places: by rank; the silent ones' are the last they told, and may be missing.
        silent: ranks that do not answer.
    """
    late = silent or late_ranks(places)
    standings = _standings(places, late or set(places), silent)
    head = f"{_named(late)} did not arrive" if late else f"{_named(places)} stopped moving"
    if not late and len(places) > 1:
        head += ", none behind the others"
    where = standings[0][1] if len(standings) == 1 else "; ".join(f"{_named(ranks)}: {text}" for ranks, text in standings)
    stacks = f"Stacks are in {folder / 'hang-rank-*.txt'}."
    return f"error: no progress for {timeout_s:g} s (run.timeout_s): {head}: {where}. {stacks}"


def late_ranks(places: dict[int, Place]) -> set[int]:
    """Ranks that the others wait for, as far as places can tell; empty where all stand alike or wait for each other."""
    behind: set[int] = set()
    ahead: set[int] = set()
    for group in {group for place in places.values() for group in place.num_collectives}:
        issued = {number: p.num_collectives[group] for number, p in places.items() if group in p.num_collectives}
        behind |= {number for number, count in issued.items() if count < max(issued.values())}
        ahead |= {number for number, count in issued.items() if count > min(issued.values())}
    if behind - ahead:
        return behind - ahead
    steps = {number: place.step for number, place in places.items()}
    return {number for number, step in steps.items() if step < max(steps.values()) and step == min(steps.values())}


def _standings(places: dict[int, Place], ranks: set[int], silent: set[int]) -> list[tuple[list[int], str]]:
    """Where `ranks` are; those at one place together, with the line of the one that has been there longest."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for number in sorted(ranks):
        place = places.get(number)
        where = f"step {place.step}, {place.phase}" if place else ""
        groups.setdefault((number in silent, where), []).append(number)
    standings = []
    for (is_silent, where), members in groups.items():
        if is_silent:
            text = f"no answer, last heard of in {where}" if where else "no answer, never heard of"
        else:
            longest = max((places[number] for number in members), key=lambda place: place.idle_s)
            text = f"in {where}, for {longest.idle_s:.0f} s, at {longest.line}"
        standings.append((members, text))
    return standings


def _named(numbers: Collection[int]) -> str:
    """`rank 1`, `ranks 1 and 3`, `ranks 0, 1, 2, 3, … (64 of them)`."""
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:4])}, … ({len(names)} of them)"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _line_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _num_collectives() -> dict[str, int]:
    """Collectives this process has issued, by process group and device. Private counters: torch has no public ones."""
    counts = {"new groups": _world.group_count}  # to make one is collective too
    for group in list(_world.pg_map):
        for device in group._device_types:
            with suppress(RuntimeError):  # a backend that does not count
                backend: Any = group._get_backend(device)
                counts[f"{group.group_name}/{device.type}"] = backend._get_sequence_number_for_group()
    return counts
