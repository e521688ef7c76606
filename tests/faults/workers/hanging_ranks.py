"""Ranks that hang in one way each, under a `Watchdog`: `hanging_ranks.py WAY FOLDER TIMEOUT_S`, started by test_hangs.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.distributed.watchdog import Watchdog

FOREVER_S = 600.0


def sleep_in_compute(watchdog: Watchdog, rank: int) -> None:
    """Rank 1 never comes to the fourth all-reduce; rank 0 waits in it."""
    for step in range(1, 6):
        watchdog.at("forward and backward", step)
        if step == 4 and rank == 1:
            sleepy_compute()
        dist.all_reduce(torch.ones(3))


def sleep_before_new_group(watchdog: Watchdog, rank: int) -> None:
    """Rank 0 waits for rank 1 inside the store itself."""
    watchdog.at("start", 1)
    if rank == 1:
        sleepy_compute()
    dist.new_group(backend="gloo")


def sleepy_compute() -> None:
    time.sleep(FOREVER_S)


def stop_rank(stopped: int) -> Callable[[Watchdog, int], None]:
    """One rank gets SIGSTOP in the saving of step 2; the other waits for it."""

    def run(watchdog: Watchdog, rank: int) -> None:
        watchdog.at("saving", 2)
        dist.barrier()
        if rank == stopped:
            time.sleep(1)  # time enough to have reported its place
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    return run


def wait_for_each_other(watchdog: Watchdog, rank: int) -> None:
    """Each rank waits in a group where the other never comes."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    watchdog.at("evaluation", 7)
    dist.all_reduce(torch.ones(1), group=groups[rank])


def be_slow(watchdog: Watchdog, rank: int) -> None:
    """No hang: rank 1 moves all the time, while rank 0 waits for it much longer than the watchdog's patience."""
    watchdog.at("evaluation", 1)
    if rank == 1:
        start_s = time.monotonic()
        while time.monotonic() - start_s < 3 * watchdog.timeout_s:
            time.sleep(watchdog.timeout_s / 4)
            watchdog.at("evaluation", 1)
    dist.all_reduce(torch.ones(1))


def be_suspended(watchdog: Watchdog, rank: int) -> None:
    """No hang: the process is stopped for longer than the watchdog's patience, as a scheduler does, and goes on."""
    watchdog.at("loading rows", 1)
    time.sleep(0.3)  # its clock runs
    waker = subprocess.Popen(["sh", "-c", f"sleep {2 * watchdog.timeout_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
    waker.wait()
    watchdog.at("update", 1)


def leave_while_peer_is_busy(watchdog: Watchdog, rank: int) -> None:
    """No hang: rank 0 leaves the watchdog, and rank 1 stays, moving, for longer than the patience."""
    for _ in range(8 * rank):
        watchdog.at("saving", 1)
        time.sleep(watchdog.timeout_s / 4)


def hang_alone(watchdog: Watchdog, rank: int) -> None:
    """One process without a process group."""
    watchdog.at("update", 5)
    sleepy_compute()


WAYS: dict[str, Callable[[Watchdog, int], None]] = {
    "sleep_in_compute": sleep_in_compute,
    "sleep_before_new_group": sleep_before_new_group,
    "stop_rank_0": stop_rank(0),
    "stop_rank_1": stop_rank(1),
    "wait_for_each_other": wait_for_each_other,
    "be_slow": be_slow,
    "be_suspended": be_suspended,
    "leave_while_peer_is_busy": leave_while_peer_is_busy,
    "hang_alone": hang_alone,
}


def main(way: str, folder: str, timeout_s: str) -> None:
    """Hang."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with Watchdog(float(timeout_s), Path(folder)) as watchdog:
        WAYS[way](watchdog, int(os.environ.get("RANK", "0")))
        print("came to the end")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
