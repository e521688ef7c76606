"""`docs/launch/slurm.sbatch`, run by bash with stand-ins for `srun` and `scontrol` on two machines: network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.harness import SCRIPT, arguments, run_with
from tests.faults.signals import wait_for_signal
from tests.faults.test_two_machines import ADDRESSES, TIMEOUT_S, machines
from tests.faults.workers import srun
from tests.support.launch import REPOSITORY, write_accelerate_yaml
from tests.support.rank import SERVER_ENVIRONMENT
from tests.support.workbench import FP32, new_bench
from toolkit.errors import EXIT_STOPPED

__all__ = ["machines"]

CHANGES = {"train__max_steps": 6, "train__micro_batch_size_rows": 2, "model__dropout": 0, "eval__generate": False}
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "machine[0-1]",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
}
SCONTROL = """#!/bin/bash
if [ "$*" = "show hostnames machine[0-1]" ]; then printf '%s\\n' {addresses}; else echo "$*" >> {calls}; fi
"""


def test_a_job_that_meets_its_time_limit_is_requeued_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, machines: list[str]
) -> None:
    bench, calls = new_bench(tmp_path_factory, "slurm"), tmp_path / "calls"
    run_with(bench, "whole", **CHANGES)
    for name, text in {
        "scontrol": SCONTROL.format(addresses=" ".join(ADDRESSES), calls=calls),
        "srun": f'#!/bin/bash\necho $$ > {tmp_path}/srun.pid\nexec {sys.executable} {srun.__file__} "$@"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    preset, _ = write_accelerate_yaml(tmp_path, "fsdp2_multi_node", FP32 | {"use_cpu": True, "num_processes": 2})
    environment = {
        **os.environ,
        **SERVER_ENVIRONMENT,
        **JOB,
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
        "TOOLKIT_ACCELERATE_YAML": str(preset),
        "TEST_MACHINES": " ".join(machines),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    recipe = [SCRIPT, *arguments(bench, "run", partial(wait_for_signal, 4, str(tmp_path / "waits")), **CHANGES)]
    command = ["bash", str(REPOSITORY / "docs/launch/slurm.sbatch"), *recipe]

    def submit() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)

    # Ahead of the time limit every task gets the signal.
    with submit() as job:
        give_up_at = time.monotonic() + TIMEOUT_S
        while len(list(tmp_path.glob("waits-*"))) < 2:
            assert job.poll() is None and time.monotonic() < give_up_at, job.communicate()[0]
            time.sleep(0.05)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
        printed = job.communicate(timeout=TIMEOUT_S)[0]
    assert job.returncode == EXIT_STOPPED and "stopped by SIGUSR1 after step 5, with a checkpoint" in printed, printed
    assert calls.read_text() == "requeue 4711\n"

    # SLURM starts the same script again.
    with submit() as job:
        printed = job.communicate(timeout=TIMEOUT_S)[0]
    assert job.returncode == 0 and "after step 5\n" in printed, printed
    assert calls.read_text() == "requeue 4711\n", "requeued after its end"
    whole, run = (bench.lines(name, "train") for name in ("whole", "run"))
    assert [line["step"] for line in run] == [1, 2, 3, 4, 5, 6]
    for figure in ("loss", "grad_norm"):
        assert [line[figure] for line in run] == pytest.approx([line[figure] for line in whole], rel=1e-6)
    assert bench.lines("run", "eval")[-1]["loss"] == pytest.approx(bench.lines("whole", "eval")[-1]["loss"], rel=1e-6)
