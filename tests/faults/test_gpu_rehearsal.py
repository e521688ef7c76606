"""`make gpu` on a machine without GPUs: torch is made to see 8 of them, and a command of each kind gets to its first CUDA call.

How a part is judged is in `tests/unit/test_gpu.py`; the parts run on a CPU in `tests/recipes/test_gpu_parts.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import DOC, Part, end_session, read_parts
from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import build_model_folders

STUB = REPOSITORY / "tests" / "support" / "eight_gpus"
TIMEOUT_S = 600
"""Of one command. The plan of an 8B model comes before its first CUDA call."""
CHOOSES_ITS_GPUS = "tests/gpu/test_hybrid_shard.py"
"""Its ranks set CUDA_VISIBLE_DEVICES, which CUDA reads at the first question."""
PROGRAM = re.compile(rf".*{CHOOSES_ITS_GPUS}|-m \S+( --on-all-gpus)?|recipes/llm\.py")
PARTS = [part for part in reversed(read_parts(DOC.read_text(encoding="utf-8"))) if PROGRAM.search(part.command)]
PARTS = [*{PROGRAM.search(part.command)[0]: part for part in PARTS if part.name != "beside-trl"}.values()]  # type: ignore[index]
"""The first of each program that is started; TRL is not among the tests' packages."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of the model that `demo` trains."""
    args = (tmp_path_factory.mktemp("models"), ["llama"])
    on_cpu = {"mixed_precision": "no", "use_cpu": True}
    folders: dict[str, Path] = run_on_ranks(build_model_folders, preset="single", overrides=on_cpu, args=args)[0]
    return folders["llama"]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_command_of_a_part_reaches_its_first_cuda_call(part: Part, llama: Path, tmp_path: Path) -> None:
    """On a machine with more GPUs than it uses, `hybrid` failed: its ranks had asked for GPUs before they chose theirs."""
    shutil.copytree(llama, tmp_path / "gpu_llm" / "export")
    asked, reached, output = tmp_path / "asked.txt", tmp_path / "reached.txt", tmp_path / "output.txt"
    command = part.command.replace("runs/gpu_", f"{tmp_path}/gpu_").replace(
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
