"""A hundred kills at random moments of one training run, which then must be the run that nobody has touched, bit for bit.

    python -m tests.faults.soak [--kills 100] [--seed 0]

recipes/t5.py on two gloo ranks under FSDP2, dropout on, two micro-batches a step, asynchronous saves, evaluations with
generation. A kill is SIGKILL of one rank or of both; stops by SIGTERM, SIGINT or SIGUSR1 come in between and do not count.
Ends with an error unless everything promised has held; the run folder then stays.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.harness import TRAINED, complete_checkpoints, run_with, start_with
from tests.support.launch import Running, run_on_ranks
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.same_runs import check_same
from tests.support.workbench import FP32, Workbench
from toolkit.errors import EXIT_STOPPED

CHANGES = TRAINED | {
    "checkpoint__every_steps": 5,
    "checkpoint__keep_last": 2,
    "checkpoint__keep_best": 1,
    "eval__every_steps": 8,
    "eval__generate": True,
    "log_every_steps": 3,
}
STEPS_PER_KILL = 12
"""More than the run gets on by from kill to kill: it must not be over before the last one."""
MOMENTS = {"step": 4, "save": 5, "start": 1}
"""What is waited for before a kill, and how often."""
STOPS = 0.1
TIMEOUT_S = 120.0
WHOLE, RUN = "whole", "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills at random moments of one run.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when; the moments still differ by the machine")
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # killed ranks leave it semaphores
    folder, drawn = Path(tempfile.mkdtemp(prefix="soak-")), random.Random(options.seed)
    bench, num_steps = build_bench(folder), STEPS_PER_KILL * options.kills + 40
    changes, moments = CHANGES | {"train__max_steps": num_steps}, Counter[str]()
    print(f"{num_steps} steps untouched, then under {options.kills} kills, with seed {options.seed}, in {folder}", flush=True)
    run_with(bench, WHOLE, timeout_s=3600, **changes)
    newest = number = 0
    while number < options.kills:
        stops = drawn.random() < STOPS
        moment = "step" if stops else drawn.choices(list(MOMENTS), weights=list(MOMENTS.values()))[0]
        victims = drawn.choice([[0], [1]] if stops else [[0], [1], [0, 1]])
        what = drawn.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]) if stops else signal.SIGKILL
        with start_with(bench, RUN, **changes) as running:
            wait_for(moment, bench.runs / RUN, drawn, running)
            for victim in victims:
                os.kill(running.pids[victim], what)
            codes = running.wait().returncodes
            assert codes == [EXIT_STOPPED] * 2 if stops else not {0, EXIT_STOPPED} & set(codes), running.last_words()
            printed = running.output()
        goes_on = f"after step {newest}\n"
        assert goes_on in printed or newest == 0 or "resuming from" not in printed, f"no {goes_on!r} in {printed[-3000:]}"
        number, before = number + (not stops), newest
        newest = max(complete_checkpoints(bench.runs / RUN), default=0) if (bench.runs / RUN / "checkpoints").exists() else 0
        assert newest >= before, f"the checkpoint of step {before} is gone, after which only that of {newest} stands"
        moments[f"{'stop' if stops else 'kill'} at a {moment}{' after new checkpoints' * (newest > before)}"] += 1
        print(f"{number}: {what.name} to {victims} at a {moment}; checkpoint {newest}", flush=True)
    assert newest < num_steps, "the run was over before the last kill"
    run_with(bench, RUN, timeout_s=3600, **changes)
    check_same(bench, RUN, WHOLE, num_steps)
    print(*(f"{count:5} {moment}" for moment, count in moments.most_common()), "the run is the one untouched", sep="\n")
    shutil.rmtree(folder)


def build_bench(folder: Path) -> Workbench:
    models = run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder / "models", ("t5",)))[0]
    save_jsonl(folder / "rows.jsonl", make_rows(60))
    return Workbench(runs=folder / "runs", models=models, data=folder)


def wait_for(moment: str, run: Path, drawn: random.Random, running: Running) -> None:
    """Return at a random time after the start, or after the first or second new checkpoint stands, or is begun."""
    if moment == "start":
        time.sleep(drawn.uniform(0, 2))
        return
    pattern = "checkpoints/step-*.tmp" if moment == "save" else "checkpoints/step-????????"
    before, deadline = set(run.glob(pattern)), time.monotonic() + TIMEOUT_S
    while len(set(run.glob(pattern)) - before) < 1:
        assert time.monotonic() < deadline, f"the moment never came\n{running.last_words()}"
        time.sleep(0.0005)
    time.sleep(drawn.uniform(0, 0.05 if moment == "save" else 0.5))


if __name__ == "__main__":
    main()
