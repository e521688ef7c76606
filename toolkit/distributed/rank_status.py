"""A rank's view of the others, through the key-value store of the process group: what the watchdog asks them."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from toolkit.distributed.hang_report import Place, Verdict, explain

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
        self.forget()

    def tell(self, place: Place) -> None:
        """Publish where this rank is."""
        self._store.set(self._own_key, json.dumps({**asdict(place), "process": f"{os.getpid()} {_machine()}"}))

    def forget(self) -> None:
        """Drop what was seen of the others, because this rank makes progress; the next `look` starts anew."""
        self._last_look_s: float | None = None
        self._before: dict[int, Place] = {}
        self._heard: set[int] = set()
        """Ranks that have reported since the first look."""
        self._silent_s = [0.0] * len(self._keys)

    def look(self, timeout_s: float, patience_s: float, folder: Path | None) -> Verdict | None:
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
