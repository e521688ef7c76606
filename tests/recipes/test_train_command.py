"""`python -m toolkit train`: the line that it prints, it runs, with the run's exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.launch import REPOSITORY, TIMEOUT_S
from tests.support.workbench import Workbench


def test_a_run_is_started_to_its_end(bench: Workbench, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("recipe: t5\noptim:\n  lr: 1.0e-3\n")

    def train(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolkit", "train", "run.yaml", *bench.flags("trained"), *flags]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)

    done = train()
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        f"\naccelerate launch --config_file {REPOSITORY}/accelerate_configs/single_cpu.yaml --quiet {REPOSITORY}/recipes/t5.py "
        in done.stdout
    )
    assert [line["step"] for line in bench.lines("trained", "train")] == [1, 2, 3]
    # What only the run itself can refuse ends with its sentence.
    refused = train("--data.files", "nowhere.jsonl")
    assert refused.returncode and refused.stderr.splitlines()[-1].startswith("error: data.files: there is no file nowhere.jsonl")
