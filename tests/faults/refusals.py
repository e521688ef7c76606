"""Launches that are refused once their ranks have met, on a machine whose cores are busy: each rank ends with 2, each time.

    python -m tests.faults.refusals [--tries 50] [--busy 2]

recipes/t5.py on two gloo ranks under the real `accelerate launch`, with a CSV file that lacks a column, beside processes that
take all the time they get. A rank that ended by a signal, a sentence missing or printed twice, or a traceback fails a try.
Exits with 1 unless all tries hold, and prints what the first of the others printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.recipes.bad_input import Case
from tests.recipes.bad_input_cases import DATA
from tests.recipes.test_bad_input import WORKING_RUN
from tests.support.launch import REPOSITORY
from toolkit.errors import EXIT_USER_ERROR

NUM_RANKS = 2
TIMEOUT_S = 600.0
CASE: Case = DATA["missing column"]
SPIN = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Refused launches on a busy machine.")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--busy", type=int, default=2, help="processes that take all the time they get")
    options = parser.parse_args()
    start_s, failures = time.monotonic(), []
    busy = [subprocess.Popen(SPIN) for _ in range(options.busy)]
    try:
        for number in range(1, options.tries + 1):
            printed, wrong = attempt()
            print(f"try {number}: {', '.join(wrong) or 'refused as it should be'}", flush=True)
            failures += [printed] if wrong else []
    finally:
        for process in busy:
            process.kill()
            process.wait()
    num_held = options.tries - len(failures)
    print(f"refused with {EXIT_USER_ERROR} on each of {NUM_RANKS} ranks: {num_held}/{options.tries} tries, {options.busy} busy")
    print(f"{(time.monotonic() - start_s) / 60:.1f} min")
    if failures:
        sys.exit(f"FAILED; the first of them printed:\n{failures[0]}")


def attempt() -> tuple[str, list[str]]:
    """One launch: what it printed on stderr, and what is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="refusals-") as name:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/fsdp2_cpu.yaml"),
                *("--main_process_port", "0", "recipes/t5.py", *WORKING_RUN.arguments(Path(name), CASE)),
            ],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    return done.stderr, [what for what, holds in look(done).items() if not holds]


def look(done: subprocess.CompletedProcess[str]) -> dict[str, bool]:
    """What must hold. The launcher lists each rank that failed with its exit code, and its own traceback, which is no rank's."""
    codes = re.findall(r"^  exitcode  : (-?\d+)", done.stderr, re.MULTILINE)
    sentences = re.findall(r"^error: .* has no column 'target' .*", done.stderr, re.MULTILINE)
    of_ranks = done.stderr[: done.stderr.find(sentences[0])] if sentences else done.stderr
    return {
        f"ranks ended with {codes}": codes == [str(EXIT_USER_ERROR)] * NUM_RANKS,
        f"the sentence stands {len(sentences)} times": len(sentences) == 1,
        "terminate called": "terminate called" not in done.stderr,
        "a traceback before the sentence": "Traceback" not in of_ranks,
        "a rank's traceback after it": not re.search(r"^\[rank\d+\]:|^Fatal Python error", done.stderr, re.MULTILINE),
        "the launch ended with 0": done.returncode != 0,
    }


if __name__ == "__main__":
    main()
