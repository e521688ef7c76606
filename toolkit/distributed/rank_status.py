"""A rank's view of the others, through the key-value store of the process group: what the watchdog asks them; and the report of a
hang: where each rank is, which ranks did not arrive, and the sentence that says so.

A rank did not arrive if it does not answer (stopped or cut off); else if it has issued fewer collectives than a peer in some
process group and more in none; else if it is in the earliest step.
"""

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

import psutil
import torch.distributed as dist

from toolkit.errors import one_line
from toolkit.private import private


@dataclass(frozen=True)
class Place:
    """Where a rank is, as it reports it."""

    phase: str
    step: int | None
    """None outside the training loop."""
    idle_s: float
    """Seconds since its last progress."""
    line: str = ""
    """File and line of its main thread's innermost Python frame; known once the rank has been idle for long."""
    num_collectives: dict[str, int] = field(default_factory=dict)
    """Collectives issued so far, by process group and device; known when `line` is."""
    beat: int = 0
    """Differs between any two reports."""
    has_left: bool = False
    """It has finished its run: no rank waits for it, and it waits for none."""
    process: str = ""
    """Process id and machine, as `peers` publishes them."""


@dataclass(frozen=True)
class Verdict:
    """The sentence that all ranks print before they exit."""

    sentence: str
    answering: list[int]
    """Ranks that answer and so will print it."""


def hang_file(folder: Path, number: int) -> Path:
    """Path of the file with the stacks of rank `number`."""
    return folder / f"hang-rank-{number:05d}.txt"


def explain(places: dict[int, Place], silent: set[int], timeout_s: float, folder: Path | None) -> str:
    """The sentence for the user. `places` by rank: those of `silent` ranks, which do not answer, are their last reports, and may
    be missing. `folder`: of the hang files, if it is known yet."""
    late = silent or late_ranks(places)
    # The ranks grouped by place, each group with a text; its line is that of the rank that has been idle longest.
    groups: dict[tuple[bool, str], list[int]] = {}
    for number in sorted(late or set(places)):
        place = places.get(number)
        where = "" if place is None else place.phase if place.step is None else f"step {place.step}, {place.phase}"
        groups.setdefault((number in silent, where), []).append(number)
    standings = []
    for (is_silent, where), members in groups.items():
        if is_silent:
            text = f"no answer, last heard of in {where}" if where else "no answer, never heard of"
        else:
            longest = max((places[number] for number in members), key=lambda place: place.idle_s)
            text = f"in {where}, for {longest.idle_s:.0f} s, at {longest.line}"
        standings.append((members, text))
    # The sentence.
    head = f"{named(late)} did not arrive" if late else f"{named(places)} stopped moving"
    if not late and len(places) > 1:
        head += ", none behind the others"
    where = standings[0][1] if len(standings) == 1 else "; ".join(f"{named(ranks)}: {text}" for ranks, text in standings)
    stacks = f"Stacks are {f'in {folder}/hang-rank-*.txt' if folder else 'on stderr'}."
    return one_line(f"error: no progress for {timeout_s:g} s (run.timeout_s): {head}: {where}. {stacks}")


def late_ranks(places: dict[int, Place]) -> set[int]:
    """Ranks that the others wait for, judged by their places; empty if all are alike or wait for each other."""
    behind: set[int] = set()
    ahead: set[int] = set()
    for group in {group for place in places.values() for group in place.num_collectives}:
        issued = {number: p.num_collectives[group] for number, p in places.items() if group in p.num_collectives}
        behind |= {number for number, count in issued.items() if count < max(issued.values())}
        ahead |= {number for number, count in issued.items() if count > min(issued.values())}
    if behind - ahead:
        return behind - ahead
    steps = {number: place.step for number, place in places.items() if place.step is not None}
    if len(steps) < len(places):
        return set()  # a rank outside the loop may be before or after it
    return {number for number, step in steps.items() if step < max(steps.values()) and step == min(steps.values())}


def named(numbers: Collection[int]) -> str:
    """`rank 1`, `ranks 1 and 3`, `ranks 0, 1, 2, 3, … (64 of them)`."""
    *others, last = map(str, sorted(numbers))
    if len(others) > 7:
        return f"ranks {', '.join(others[:4])}, … ({len(others) + 1} of them)"
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def line_of_main_thread() -> str:
    """File, line and function of the main thread's innermost Python frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def num_collectives() -> dict[str, int]:
    """Collectives that this process has issued, by process group and device."""
    world = private("_world")
    counts = {"new groups": world.group_count}  # creating a group is collective too
    for group in list(world.pg_map):
        for device in private("_device_types", group):
            with suppress(RuntimeError):  # the backend does not count
                backend = private("_get_backend", group)(device)
                counts[f"{group.group_name}/{device.type}"] = private("_get_sequence_number_for_group", backend)()
    return counts


REPORT_BYTES = 512
"""Upper bound of one report of a rank's place."""
ANSWER_S = 5.0
"""A rank or the store counts as silent after this time without an answer, or after half of the timeout if that is longer."""
LOOK_S = 10.0
"""Longest time between two looks at the other ranks."""


class Peers:
    """A rank's view of the others, through a separate connection to the store: the main thread may be waiting in its own."""

    def __init__(self, store: Any, own_rank: int, num_ranks: int) -> None:
        # The group's store belongs to this attempt alone (`toolkit.distributed.rendezvous`), so it has no earlier verdict.
        self._store = dist.PrefixStore("watchdog", store.clone())
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._keys = [f"place/{number}" for number in range(num_ranks)]
        self._own_key = self._keys[own_rank]
        self.clear()

    def publish(self, place: Place) -> None:
        """Publish where this rank is."""
        self._store.set(self._own_key, json.dumps({**asdict(place), "process": f"{os.getpid()} {_machine()}"}))

    def clear(self) -> None:
        """Drop what was seen of the others, because this rank makes progress; the next `look` starts anew."""
        self._last_look_s: float | None = None
        self._before: dict[int, Place] = {}
        self._heard: set[int] = set()
        """Ranks that have reported since the first look."""
        self._silent_s = [0.0] * len(self._keys)

    def poll(self, timeout_s: float, patience_s: float, folder: Path | None) -> Verdict | None:
        """The verdict, if the job hangs; None while it may still make progress."""
        if self._store.check(["verdict"]):
            return Verdict(**json.loads(self._store.get("verdict")))
        now_s, every_s = time.monotonic(), min(LOOK_S, timeout_s / 10)
        since_last_s = None if self._last_look_s is None else now_s - self._last_look_s
        if since_last_s is not None and since_last_s < every_s:
            return None
        before, places = self._before, self._places()
        self._last_look_s, self._before = now_s, places
        if since_last_s is None:
            return None

        # Which ranks have reported since the last look, and for how long the others have been silent.
        reported = {number for number, place in places.items() if place != before.get(number)}
        self._heard |= reported
        for number in range(len(self._keys)):
            # The pause of a suspended job does not count as silence.
            self._silent_s[number] = 0.0 if number in reported else self._silent_s[number] + min(since_last_s, every_s + 1)
        silent = {number for number, seconds in enumerate(self._silent_s) if seconds >= patience_s}
        gone = {number for number, place in places.items() if place.has_left}
        answering = set(range(len(self._keys))) - silent - gone
        if not answering <= self._heard or any(places[number].idle_s < timeout_s for number in answering):
            return None

        # Nobody who answers has made progress. The first verdict in the store holds for all ranks.
        here = {number: place for number, place in places.items() if number not in gone}
        verdict = Verdict(explain(here, silent - gone, timeout_s, folder), sorted(answering))
        return Verdict(**json.loads(self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))))

    def wait_until_shown(self, verdict: Verdict) -> None:
        """Return once every answering rank has written its stacks. A rank outside `answering` that answers again waits too."""
        num_shown = self._store.add("shown", 1)
        while num_shown < len(verdict.answering):
            time.sleep(0.05)
            num_shown = self._store.add("shown", 0)

    def find_gone(self, patience_s: float = ANSWER_S) -> tuple[list[int], bool]:
        """Ranks whose process on this machine has ended, else those that report nothing; and whether this rank is the first
        of its machine to ask. What the first of all ranks finds holds for all, since ranks leave because of it.
        """
        before, give_up_at, gone = self._places(), time.monotonic() + patience_s, list[int]()
        while not gone and time.monotonic() < give_up_at and not self._store.check(["gone"]):
            time.sleep(0.02)
            gone = [number for number, place in self._places().items() if _has_ended(place)]
        places = self._places().items()
        gone = gone or [number for number, place in places if place == before.get(number) and not place.has_left]
        found: list[int] = json.loads(self._store.compare_set("gone", "", json.dumps(gone)))
        return found, self._store.compare_set(f"speaker/{_machine()}", "", self._own_key).decode() == self._own_key

    def _places(self) -> dict[int, Place]:
        """The places of the ranks that have ever reported one, by rank."""
        reported = list(range(len(self._keys)))
        if not self._store.check(self._keys):
            reported = [number for number in reported if self._store.check([self._keys[number]])]
        values = self._store.multi_get([self._keys[number] for number in reported])
        return {number: Place(**json.loads(value)) for number, value in zip(reported, values, strict=True)}


def _machine() -> str:
    """Equal for processes that see each other's ids; "" where that is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:13] + os.readlink("/proc/self/ns/pid")
    return ""


def _has_ended(place: Place) -> bool:
    pid, _, machine = place.process.partition(" ")
    with suppress(psutil.NoSuchProcess):
        return bool(machine) and machine == _machine() and psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    return True


def store_bytes_per_s(num_ranks: int, report_every_s: float, look_every_s: float) -> float:
    """Upper bound of what the host of the store reads and writes: every rank reports its place, and in a look reads all."""
    return REPORT_BYTES * (num_ranks / report_every_s + 2 * num_ranks**2 / look_every_s)
