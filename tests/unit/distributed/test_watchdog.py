"""Who did not arrive, and when a watchdog bites; on real ranks: tests/faults/test_hangs.py."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from toolkit.distributed import rank_status
from toolkit.distributed.rank_status import Peers, Place, _machine, explain, hang_file, late_ranks
from toolkit.distributed.watchdog import Watchdog

WAITS = Place("forward and backward", 4, 31.2, "loop.py:9 in train_step", {"0/cpu": 12, "1/cpu": 3})
LATE = replace(WAITS, line="rows.py:7 in read", num_collectives={"0/cpu": 11, "1/cpu": 3})
IN_READ = "in step 4, forward and backward, for 31 s, at rows.py:7 in read"


def place(step: int | None = 4, **num_collectives: int) -> Place:
    """A rank that stands still."""
    return Place("update", step, 31.0, "a.py:1 in f", num_collectives)


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ([place(a=5), place(a=3), place(a=4)], {1}),  # the others come next, but it is the last that all wait for
        ([place(a=5, b=1), place(a=5)], set()),  # a group of one part of the ranks
        # A device that works behind lets one rank run ahead; without counters there is nothing but steps.
        ([place(3), place(4), place(4)], {0}),
        ([place(3, a=6), place(4, a=5)], {1}),
        # Outside the loop there are no steps: who is before it, and who behind it, is not known.
        ([place(None, a=6), place(4, a=5)], {1}),
        ([place(None), place(4)], set()),
    ],
)
def test_late_ranks(places, late):
    """One late rank, several, none, and some that wait for each other have their sentences below."""
    assert late_ranks(dict(enumerate(places))) == late


@pytest.mark.parametrize(
    ("places", "silent", "sentence"),
    [
        ({0: WAITS, 1: LATE}, set(), f"rank 1 did not arrive: {IN_READ}"),
        ({0: LATE, 1: WAITS, 2: LATE}, set(), f"ranks 0 and 2 did not arrive: {IN_READ}"),
        # A silent rank explains a hang by itself, whatever the counters of the others say.
        ({0: WAITS, 1: LATE, 2: place(2)}, {2}, "rank 2 did not arrive: no answer, last heard of in step 2, update"),
        ({0: WAITS}, {1}, "rank 1 did not arrive: no answer, never heard of"),
        (
            {0: WAITS, 2: place(3)}, {1, 2},
            "ranks 1 and 2 did not arrive: rank 1: no answer, never heard of; rank 2: no answer, last heard of in step 3, update",
        ),
        ({0: WAITS}, set(), "rank 0 stopped moving: in step 4, forward and backward, for 31 s, at loop.py:9 in train_step"),
        (
            {0: place(a=2, b=1), 1: replace(place(a=1, b=2), phase="saving", idle_s=40.0)}, set(),
            "ranks 0 and 1 stopped moving, none behind the others: rank 0: in step 4, update, for 31 s, at a.py:1 in f; "
            "rank 1: in step 4, saving, for 40 s, at a.py:1 in f",
        ),
        ({0: place(None, a=2), 1: Place("tokenizing", None, 31.0, "a.py:1 in f", {"a": 1})}, set(),
         "rank 1 did not arrive: in tokenizing, for 31 s, at a.py:1 in f"),
        (
            {number: place(a=1) for number in range(64)}, set(),
            "ranks 0, 1, 2, 3, … (64 of them) stopped moving, none behind the others: "
            "in step 4, update, for 31 s, at a.py:1 in f",
        ),
    ],
)  # fmt: skip
def test_the_sentence(places, silent, sentence):
    said = f"error: no progress for 30 s (run.timeout_s): {sentence}. Stacks are in runs/a/hang-rank-*.txt."
    assert explain(places, silent, 30, Path("runs/a")) == said
    any_name = explain(places, silent, 30, Path("runs/a\nb\udce9"))
    assert any_name.endswith(r" Stacks are in runs/a\nb\udce9/hang-rank-*.txt.") and any_name.encode()


@pytest.mark.parametrize(("enters_until", "counts_cpu", "bites_at"), [(20, False, 30), (1, False, 11), (1, True, 30)])
def test_it_bites_once_nothing_moves_and_work_is_movement_only_in_a_phase_that_says_so(
    enters_until, counts_cpu, bites_at, tmp_path, monkeypatch
):
    """A host that waits for a GPU takes a whole core. This process works until the 20th look; ten of them are its patience."""
    watchdog, bites, look = Watchdog(1.0, tmp_path), Mock(), 0

    def wait(_: float) -> bool:
        nonlocal look
        look += 1
        if look <= enters_until:  # the same place again and again is progress: a micro-batch more
            watchdog.enter_phase("evaluation", 3, counts_cpu=counts_cpu)
        return bites.called or look > 99

    clock = SimpleNamespace(monotonic=lambda: look / 10, thread_time=float, time_ns=int)
    monkeypatch.setattr("toolkit.distributed.watchdog.time", clock)
    activity = SimpleNamespace(restart=lambda _: None, has_worked=lambda _: look <= 20)
    stopped = SimpleNamespace(wait=wait)
    vars(watchdog).update(_rank=0, _world_size=1, _stopped=stopped, _activity=activity, _end=bites)
    watchdog._keep_time()
    assert bites_at < look <= bites_at + 2
    (verdict,) = bites.call_args.args
    assert "rank 0 stopped moving: in step 3, evaluation, for 1 s, at " in verdict.sentence


def test_after_its_end_it_is_quiet(tmp_path):
    before = threading.active_count()
    watchdog = Watchdog(0.3, tmp_path)
    vars(watchdog)["_end"] = bites = Mock()
    with watchdog:
        watchdog.enter_phase("update", 1)
    assert threading.active_count() == before
    watchdog.__exit__(None, None, None)
    watchdog.enter_phase("update", 2)
    time.sleep(0.6)
    assert not bites.called
    assert not hang_file(tmp_path, 0).exists()


def judge(places: dict[int, Callable[[int], Place]], timeout_s: float = 1.0, patience_s: float = 0.3) -> str | None:
    """What rank 0 of three says, which looks at all until it has been patient; each reports a place at every look, or None."""
    ranks = three_ranks()
    for look in range(8):
        for number, report in places.items():
            ranks[number].publish(replace(report(look), beat=look))
        if verdict := ranks[0].poll(timeout_s, patience_s, None):
            return verdict.sentence
        time.sleep(timeout_s / 10)
    return None


def test_a_job_in_which_one_rank_moves_does_not_hang():
    """One that has left is not waited for; one is silent only after as long a time as the patience: a library call may keep its
    threads from the GIL for a while."""
    still = {number: lambda _: place() for number in (0, 1)}
    assert judge({**still, 2: lambda look: replace(place(), idle_s=0.1 * look)}) is None
    assert judge({**still, 2: lambda look: replace(place(), idle_s=0.5 + 0.1 * look)}) is not None
    assert "rank 2 did not arrive: no answer, never heard of" in str(judge(still))
    assert judge(still, patience_s=9.0) is None
    left, shows = replace(place(None), has_left=True), Place("showing the results", None, 5.0, "results.py:3 in show")
    sentence = judge({0: lambda _: shows, 1: lambda _: left, 2: lambda _: left})
    assert sentence and "rank 0 stopped moving: in showing the results, for 5 s" in sentence


def three_ranks(*processes: str) -> list[Peers]:
    """Three ranks in a store, of which each has reported once, as the process that is given for it."""
    store = dist.HashStore()
    ranks = [Peers(store, number, 3) for number in range(3)]
    for number, process in enumerate(processes):
        ranks[number].publish(place())
        told = json.loads(ranks[number]._store.get(f"place/{number}")) | ({"process": process} if process else {})
        ranks[number]._store.set(f"place/{number}", json.dumps(told))
    return ranks


def test_a_rank_whose_process_has_ended_is_gone_at_once_and_for_all(monkeypatch):
    with subprocess.Popen(["true"]) as ended:
        pass
    ranks = three_ranks("", f"{ended.pid} {_machine()}", "")
    assert ranks[2].find_gone(patience_s=100) == ([1], True)
    assert ranks[0].find_gone(patience_s=100) == ([1], False)
    monkeypatch.setattr(rank_status, "_machine", lambda: "another")  # whose launcher prints elsewhere
    assert [ranks[number].find_gone(patience_s=100) for number in (0, 2)] == [([1], True), ([1], False)]


def test_a_rank_of_another_machine_is_gone_once_it_is_silent():
    """Process ids of another machine say nothing here."""
    ranks = three_ranks("", f"{2**22} another", f"{os.getpid()} another")
    with ThreadPoolExecutor() as threads:
        found, beat = threads.submit(ranks[0].find_gone, patience_s=2), 0
        while not found.done():
            beat += 1
            for number in (0, 2):
                ranks[number].publish(replace(place(), beat=beat))
            time.sleep(0.02)
    assert found.result() == ([1], True)
