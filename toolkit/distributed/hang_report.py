"""Where ranks stand when a run no longer moves, which of them did not arrive, and the sentence that says so.

Who did not arrive: a rank that does not answer (stopped or cut off); else one that has issued fewer collectives than a peer in
some process group and more in none; else one in the earliest step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _world


@dataclass(frozen=True)
class Place:
    """Where a rank stands, in its own words."""

    phase: str
    step: int | None
    """None outside the training loop."""
    idle_s: float
    """Seconds since it last moved."""
    line: str = ""
    """Of its main thread's innermost Python frame; known once the rank has stood still for long."""
    num_collectives: dict[str, int] = field(default_factory=dict)
    """Issued so far, by process group and device; known as `line` is."""
    beat: int = 0
    """Differs between any two reports."""
    has_left: bool = False
    """It came to the end of its run: nobody waits for it, and it for nobody."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks print before they exit."""

    sentence: str
    answering: list[int]
    """Ranks that will print it."""


def hang_file(folder: Path, number: int) -> Path:
    """Where rank `number` leaves its stacks."""
    return folder / f"hang-rank-{number:05d}.txt"


def explain(places: dict[int, Place], silent: set[int], timeout_s: float, folder: Path | None) -> str:
    """The sentence for the user.

    Args:
        places: by rank; the silent ones' are the last they reported, and may be missing.
        silent: ranks that do not answer.
        folder: of the hang files, where there is one yet.
    """
    late = silent or late_ranks(places)
    standings = _standings(places, late or set(places), silent)
    head = f"{_named(late)} did not arrive" if late else f"{_named(places)} stopped moving"
    if not late and len(places) > 1:
        head += ", none behind the others"
    where = standings[0][1] if len(standings) == 1 else "; ".join(f"{_named(ranks)}: {text}" for ranks, text in standings)
    stacks = f"Stacks are {f'in {folder}/hang-rank-*.txt' if folder else 'on stderr'}."
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
    steps = {number: place.step for number, place in places.items() if place.step is not None}
    if len(steps) < len(places):
        return set()  # who is before the loop, and who behind it, is not known
    return {number for number, step in steps.items() if step < max(steps.values()) and step == min(steps.values())}


def _standings(places: dict[int, Place], ranks: set[int], silent: set[int]) -> list[tuple[list[int], str]]:
    """Where `ranks` are; those at one place together, with the line of the one that has been there longest."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for number in sorted(ranks):
        place = places.get(number)
        where = _where(place) if place else ""
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


def _where(place: Place) -> str:
    return place.phase if place.step is None else f"step {place.step}, {place.phase}"


def _named(numbers: Collection[int]) -> str:
    """`rank 1`, `ranks 1 and 3`, `ranks 0, 1, 2, 3, … (64 of them)`."""
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:4])}, … ({len(names)} of them)"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def line_of_main_thread() -> str:
    """Its innermost Python frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def num_collectives() -> dict[str, int]:
    """Collectives this process has issued, by process group and device. Private counters: torch has no public ones."""
    counts = {"new groups": _world.group_count}  # to make one is collective too
    for group in list(_world.pg_map):
        for device in group._device_types:
            with suppress(RuntimeError):  # a backend that does not count
                backend: Any = group._get_backend(device)
                counts[f"{group.group_name}/{device.type}"] = backend._get_sequence_number_for_group()
    return counts
