"""The report of a hang: where each rank is, which ranks did not arrive, and the sentence that says so.

A rank did not arrive if it does not answer (stopped or cut off); else if it has issued fewer collectives than a peer in some
process group and more in none; else if it is in the earliest step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
    """The sentence for the user.

    Args:
        places: by rank. Those of silent ranks are their last reports, and may be missing.
        silent: ranks that do not answer.
        folder: folder of the hang files, if it is known yet.
    """
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
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:4])}, … ({len(names)} of them)"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


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
