"""How far the losses of a run drift apart that goes on with another number of processes, by its learning rate.

    python -m tests.faults.elastic_rates

A tiny T5 in fp32, constant learning rate: 48 steps on two ranks under FSDP2, and from its checkpoint of step 2 on one process.
Prints the largest relative difference of a loss until step 6, 12, 24 and 48; docs/checkpoints.md has the figures.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.faults.soak import build_bench

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
NUM_STEPS, SAVED_STEP = 48, 2
SETTINGS: dict[str, Any] = {
    "model__dropout": 0,
    "train__max_steps": NUM_STEPS,
    "train__global_batch_size_rows": 17,
    "checkpoint__every_steps": SAVED_STEP,
    "checkpoint__keep_last": NUM_STEPS,
    "eval__every_steps": NUM_STEPS,
    "eval__generate": False,
    "optim__schedule": "constant",
    "optim__warmup_steps": 0,
    "optim__weight_decay": 0.1,
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        bench = build_bench(Path(name))
        for rate in LEARNING_RATES:
            on_two, on_one = f"two-{rate}", f"one-{rate}"
            bench.run(on_two, **SETTINGS, optim__lr=rate)
            later = [f"step-{step:08d}" for step in range(SAVED_STEP + 1, NUM_STEPS + 1)]
            shutil.copytree(bench.runs / on_two, bench.runs / on_one, ignore=shutil.ignore_patterns(*later))
            assert f"after step {SAVED_STEP}\n" in bench.run(on_one, preset="single", **SETTINGS, optim__lr=rate)
            losses = [[line["loss"] for line in bench.lines(run, "train")] for run in (on_two, on_one)]
            drifts = [abs(one - two) / two for two, one in zip(*losses, strict=True)]
            print(f"{rate:g}:", *(f"until step {last} {max(drifts[:last]):.1e}" for last in (6, 12, 24, 48)), flush=True)


if __name__ == "__main__":
    main()
