"""`make gpu` on a machine without GPUs: torch is made to see 8 of them, and a command of each kind gets to its first CUDA call.

What a check makes of its output is in `tests/unit/test_gpu_first_run.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_first_run import DOC, Check, read_checks
from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import build_model_folders

STUB = REPOSITORY / "tests" / "support" / "eight_gpus"
TIMEOUT_S = 600
"""Of one command. The plan of an 8B model comes before its first CUDA call."""
CHOOSES_ITS_GPUS = "tests/gpu/test_hybrid_shard.py"
"""Its ranks set CUDA_VISIBLE_DEVICES, which CUDA reads at the first question."""
PROGRAM = re.compile(rf".*{CHOOSES_ITS_GPUS}|-m \S+|recipes/llm\.py")
CHECKS = [check for check in reversed(read_checks(DOC.read_text(encoding="utf-8"))) if PROGRAM.search(check.command)]
CHECKS = [*{PROGRAM.search(check.command)[0]: check for check in CHECKS}.values()]  # type: ignore[index]
"""The first of each program that is started."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of the model that check 1 trains."""
    args = (tmp_path_factory.mktemp("models"), ["llama"])
    on_cpu = {"mixed_precision": "no", "use_cpu": True}
    folders: dict[str, Path] = run_on_ranks(build_model_folders, preset="single", overrides=on_cpu, args=args)[0]
    return folders["llama"]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.number))
def test_the_command_of_a_check_reaches_its_first_cuda_call(check: Check, llama: Path, tmp_path: Path) -> None:
    """On a machine with more GPUs than it uses, check 5 failed: its ranks had asked for GPUs before they chose theirs."""
    shutil.copytree(llama, tmp_path / "gpu_llm" / "export")
    asked, reached, output = tmp_path / "asked.txt", tmp_path / "reached.txt", tmp_path / "output.txt"
    command = check.command.replace("runs/gpu_", f"{tmp_path}/gpu_").replace(
        "--run.name", f"--run.output_dir {tmp_path} --run.name"
    )
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(STUB), str(REPOSITORY)]), "PYTEST_ADDOPTS": "--maxfail=1 -p no:cacheprovider",
        "TMPDIR": str(tmp_path), "ASKED": str(asked), "REACHED": str(reached),
    }  # fmt: skip
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=REPOSITORY, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and not reached.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
    finally:
        end_session(process)
    assert reached.exists(), output.read_text(errors="replace")[-3000:]
    if CHOOSES_ITS_GPUS in command:
        users = {line.split()[0] for line in reached.read_text().splitlines()}
        lines = [line.split() for path in (asked, reached) for line in path.read_text().splitlines()]
        assert {visible for user, visible, _ in lines if user in users} <= {"0,1", "2,3"}, lines


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what the command has started: launchers and ranks may lead sessions of their own."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
