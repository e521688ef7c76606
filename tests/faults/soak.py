"""A hundred kills at random moments of one training run, which then must be the run that nobody has touched, bit for bit.

    python -m tests.faults.soak [--kills 100] [--seed 0]

recipes/t5.py on two gloo ranks under FSDP2, dropout on, two micro-batches a step, asynchronous saves, evaluations with
generation. A kill is SIGKILL of one rank or of both; stops by SIGTERM, SIGINT or SIGUSR1 come in between and do not count.
`marked_ranks.py` says where each rank was. Exits with 1 unless everything promised has held; the run folder then stays.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.same_run import find_differences, rows_of
from tests.faults.workers.marked_ranks import open_marks
from tests.support.launch import Running, run_on_ranks, start
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.workbench import FP32, RECIPE, Workbench
from toolkit.errors import EXIT_STOPPED

EVERY_STEPS = 5
EVAL_EVERY_STEPS = 8
CHANGES: dict[str, Any] = {
    "model__dropout": 0.1,
    "train__micro_batch_size_rows": 2,  # two micro-batches a step on each of two processes
    "checkpoint__every_steps": EVERY_STEPS,
    "checkpoint__keep_last": 2,
    "checkpoint__keep_best": 1,
    "eval__every_steps": EVAL_EVERY_STEPS,
    "log_every_steps": 3,
    "log_row_ids": True,
}
STEPS_PER_KILL = 5
"""About twice what the run gets on by from kill to kill: it must not be over before the last one."""
MOMENTS = {"steps": 40, "save": 40, "evaluation": 10, "start": 10}
"""What is waited for before a kill, and how often in a hundred."""
STOPS = 0.1
"""Stops by a signal, as a share of the kills."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TIMEOUT_S = 120.0
WHOLE, RUN = "whole", "killed"
Marks = list[np.memmap]


@dataclass(frozen=True)
class Kill:
    """One SIGKILL and what it cost."""

    phase: str
    """Of the training thread of a rank killed."""
    step: int
    """Where that was; 0: not yet in one."""
    save_phase: str
    """Of its writing thread; empty: no save was under way."""
    num_new: int
    """Steps done since the start of the processes killed."""
    num_again: int
    """Steps done that the last checkpoint does not have."""
    num_behind_save: int
    """Steps done since the save under way was asked for."""


@dataclass
class Soak:
    """The run under kills, from one process to the next."""

    bench: Workbench
    num_steps: int
    drawn: random.Random
    kills: list[Kill] = field(default_factory=list)
    num_survived: int = 0
    num_stops: int = 0
    newest: int = 0
    """Step of the last checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills at random moments of one run.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when; the moments still differ by the machine")
    options = parser.parse_args()
    # Ranks that are killed leave semaphores to Python's resource tracker, which warns of them at the end.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    num_steps = STEPS_PER_KILL * options.kills + 40
    start_s = time.monotonic()
    print(f"{num_steps} steps untouched, then under {options.kills} kills, with seed {options.seed}, in {folder}", flush=True)
    soak = Soak(build_bench(folder), num_steps, random.Random(options.seed))
    try:
        finish(soak.bench, WHOLE, num_steps)
        kill_again_and_again(soak, options.kills)
        check_went_on(soak, *finish(soak.bench, RUN, num_steps))
        failures = report(soak)
    except AssertionError as error:
        print(f"kills survived {soak.num_survived}/{options.kills}")
        failures = [str(error)]
    print(f"{(time.monotonic() - start_s) / 60:.1f} min")
    if failures:
        sys.exit("\n".join(["FAILED:", *failures, f"the runs stay in {folder}"]))
    shutil.rmtree(folder)


def build_bench(folder: Path) -> Workbench:
    """Model, rows and a place for the runs."""
    models = run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder / "models",))[0]
    save_jsonl(folder / "rows.jsonl", make_rows(60))
    return Workbench(runs=folder / "runs", models=models, data=folder)


def begin(bench: Workbench, name: str, num_steps: int) -> tuple[Running, Marks]:
    """Start the run, or go on with it, with new marks."""
    folder = bench.data / "marks"
    folder.mkdir(exist_ok=True)
    marks = [open_marks(folder, rank, "w+") for rank in range(2)]
    for mark in marks:
        mark["num_done"] = -1
    flags = bench.flags(name, **CHANGES, train__max_steps=num_steps)
    script = Path(__file__).with_name("workers") / "marked_ranks.py"
    return start(script, [str(folder), str(RECIPE), *flags], preset="fsdp2_cpu", overrides=FP32), marks


def finish(bench: Workbench, name: str, num_steps: int) -> tuple[Marks, str]:
    """Run to the end; what the ranks have marked and printed."""
    running, marks = begin(bench, name, num_steps)
    with running:
        result = running.wait(timeout_s=3600)
        assert result.returncodes == [0, 0], running.last_words()
    return marks, result.stdout


def kill_again_and_again(soak: Soak, num_kills: int) -> None:
    """Start and kill, and now and then start and stop."""
    stops = set(soak.drawn.sample(range(num_kills), round(num_kills * STOPS)))
    for number in range(num_kills):
        if number in stops:
            stop(soak)
        kill(soak)


def kill(soak: Soak) -> None:
    """Start the run, wait for a moment, kill one rank or both, and look at what is left."""
    moment = soak.drawn.choices(list(MOMENTS), weights=list(MOMENTS.values()))[0]
    victims = soak.drawn.choice([[0], [1], [0, 1]])
    running, marks = begin(soak.bench, RUN, soak.num_steps)
    with running:
        wait_for_moment(soak.drawn, moment, running, marks)
        for victim in victims:
            os.kill(running.pids[victim], signal.SIGKILL)
        codes = running.wait().returncodes
        assert all(codes[victim] == -signal.SIGKILL for victim in victims), f"ended by itself\n{running.last_words()}"
        assert not {0, EXIT_STOPPED} & set(codes), f"the rank left behind says that all is well: {codes}"
        printed = running.output()
    check_went_on(soak, marks, printed)
    soak.newest = newest_checkpoint(soak, marks)
    soak.kills.append(one := describe(marks, victims[0], soak.newest))
    saving = f", save of step {marks[victims[0]][0]['save_step']} at its {one.save_phase}" if one.save_phase else ""
    print(
        f"kill {len(soak.kills)}: {'both ranks' if len(victims) == 2 else f'rank {victims[0]}'} in {one.phase}"
        f"{f' of step {one.step}' if one.step else ''}{saving}; checkpoint {soak.newest}, {one.num_again} steps again",
        flush=True,
    )


def describe(marks: Marks, victim: int, newest: int) -> Kill:
    """A kill, by what the ranks had marked; `newest` is the checkpoint that it left."""
    mark = marks[victim][0]
    num_done = max(int(rank[0]["num_done"]) for rank in marks)
    first_step = max(int(rank[0]["first_step"]) for rank in marks)
    unfinished = max(int(rank[0]["save_step"]) if rank[0]["save_phase"] else 0 for rank in marks)
    return Kill(
        phase=mark["phase"].decode() or "start-up",
        step=int(mark["step"]),
        save_phase=mark["save_phase"].decode(),
        num_new=num_done - first_step + 1 if first_step else 0,
        num_again=max(0, num_done - newest),
        num_behind_save=num_done - unfinished if unfinished > newest else 0,
    )


def stop(soak: Soak) -> None:
    """Start the run, send one rank a signal once it trains, and see a checkpoint of the last step done."""
    number, target = soak.drawn.choice(STOP_SIGNALS), soak.drawn.randrange(2)
    running, marks = begin(soak.bench, RUN, soak.num_steps)
    with running:
        wait_for_moment(soak.drawn, soak.drawn.choice(["steps", "save", "evaluation"]), running, marks)
        num_done = max(int(mark[0]["num_done"]) for mark in marks)
        os.kill(running.pids[target], number)
        assert running.wait().returncodes == [EXIT_STOPPED] * 2, f"{number.name}: {running.last_words()}"
        printed = running.output()
    check_went_on(soak, marks, printed)
    soak.newest = newest_checkpoint(soak, marks)
    last = int(marks[0][0]["num_done"])
    assert soak.newest == last >= num_done, f"{number.name} after step {num_done}: step {last} done, checkpoint {soak.newest}"
    soak.num_stops += 1
    print(f"stop: {number.name} to rank {target} after step {num_done}; checkpoint {soak.newest}", flush=True)


def wait_for_moment(drawn: random.Random, moment: str, running: Running, marks: Marks) -> None:
    """Return at a random time of the kind that `moment` names."""
    mark = marks[0]
    if moment == "start":
        time.sleep(drawn.uniform(0, 2))
    elif moment == "steps":
        num_steps = drawn.randint(1, 2 * EVERY_STEPS)
        wait_until(lambda: mark["first_step"][0] and mark["num_done"][0] - mark["first_step"][0] + 1 >= num_steps, running)
        time.sleep(drawn.uniform(0, 0.15))
    elif moment == "evaluation":
        wait_until(lambda: mark["phase"][0] == b"evaluation", running)
        time.sleep(drawn.uniform(0, 0.2))
    else:
        num_saves = drawn.randint(1, 2)
        wait_until(lambda: mark["num_saves"][0] >= num_saves and mark["save_phase"][0], running)
        if drawn.random() < 0.5:
            time.sleep(drawn.uniform(0, 0.4))
        else:  # where a part of it begins that is too short to be hit by chance
            phase = drawn.choice([b"shards", b"hashes", b"manifest and rename", b"pruning"])
            wait_until(lambda: mark["save_phase"][0] in (phase, b""), running)
            time.sleep(drawn.uniform(0, 0.01))


def wait_until(holds: Callable[[], Any], running: Running) -> None:
    """Look every half millisecond."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        ended = [pid for pid in running.pids if not Path(f"/proc/{pid}").exists()]
        assert not ended and time.monotonic() < deadline, f"the moment never came\n{running.last_words()}"
        time.sleep(0.0005)


def check_went_on(soak: Soak, marks: Marks, printed: str) -> None:
    """A process that has begun a step has begun the one after the last checkpoint; all kills before it are survived then."""
    first_steps = {int(mark[0]["first_step"]) for mark in marks} - {0}
    if first_steps:
        assert first_steps == {soak.newest + 1}, f"went on with step {first_steps} after checkpoint {soak.newest}\n{printed}"
        goes_on = f"step-{soak.newest:08d}, after step {soak.newest}\n" in printed
        assert goes_on == (soak.newest > 0), f"does not say that it goes on after step {soak.newest}\n{printed}"
        soak.num_survived = len(soak.kills)


def newest_checkpoint(soak: Soak, marks: Marks) -> int:
    """Step of the newest checkpoint, by the files; no older than the last commit that came back."""
    folders = sorted((soak.bench.runs / RUN / "checkpoints").glob("step-*"))
    stand = [folder for folder in folders if folder.suffix in ("", ".old") and (folder / "manifest.json").exists()]
    newest = max((int(folder.stem.removeprefix("step-")) for folder in stand), default=0)
    assert newest >= max(soak.newest, int(marks[0][0]["committed"])), f"a checkpoint is gone: {[f.name for f in folders]}"
    return newest


def report(soak: Soak) -> list[str]:
    """Print what came out; returns what is not as it should be."""
    kills, bench = soak.kills, soak.bench
    for title, phases in {
        "training thread of a rank killed": Counter(kill.phase for kill in kills),
        "its save under way": Counter(kill.save_phase or "none" for kill in kills),
    }.items():
        print(f"\n{title}:")
        print(*(f"{count:5} {'#' * count} {phase}" for phase, count in phases.most_common()), sep="\n")
    num_saving, num_trained = sum(bool(kill.save_phase) for kill in kills), sum(kill.num_new > 0 for kill in kills)
    num_again, num_behind = (max(getattr(kill, name) for kill in kills) for name in ("num_again", "num_behind_save"))
    num_beyond = sum(kill.num_again > EVERY_STEPS for kill in kills)
    print(f"\n{soak.num_stops} stops by a signal; {num_saving} kills during a save, {num_trained} after a new step")
    print(
        f"steps done twice after a kill: at most {num_again}; more than checkpoint.every_steps ({EVERY_STEPS}) after "
        f"{num_beyond} kills, each during a save behind which training had gone on, by {num_behind} steps at most"
    )
    whole, killed = (Counter(rows_of(bench.runs / name)) for name in (WHOLE, RUN))
    num_lost, num_repeated = sum((whole - killed).values()), sum((killed - whole).values())
    differences = find_differences(bench, WHOLE, RUN, soak.num_steps)
    print(f"kills survived {soak.num_survived}/{len(kills)}")
    print(f"rows lost {num_lost}\nrows repeated {num_repeated}")
    print("curve NOT equal" if differences else "curve equal")
    checks = {
        "not every kill was survived": soak.num_survived == len(kills),
        "rows were lost or repeated": num_lost == num_repeated == 0,
        f"{len(differences)} differences from the run untouched: {', '.join(differences[:6])}": not differences,
        "more was done twice than an interval and what was trained behind a save": all(
            kill.num_again <= EVERY_STEPS + kill.num_behind_save for kill in kills
        ),
        "fewer than a quarter of the kills came during a save": 4 * num_saving >= len(kills),
        "fewer than half of the kills came after a new step": 2 * num_trained >= len(kills),
    }
    return [failure for failure, holds in checks.items() if not holds]


if __name__ == "__main__":
    main()
