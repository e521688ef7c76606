"""`docs/launch/slurm.sbatch` under SLURM itself: a cluster of this machine, with daemons of the test's own. `make test-slurm`."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, free_port, write_accelerate_yaml
from tests.support.workbench import FP32

CHANGES = {"train__max_steps": 150, "model__dropout": 0.1, "eval__generate": False, "checkpoint__every_steps": 1000}
LIMITS = ["--time=3", "--signal=USR1@60"]
"""SLURM counts in minutes, and sends the signal up to a minute earlier: after 1 to 2 of 3."""
TIMEOUT_S = 900
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/socket
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of SLURM's commands, while the daemons run."""
    folder = tmp_path_factory.mktemp("cluster")
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=socket.gethostname().split(".")[0], **ports))
    (folder / "key-file").write_bytes(os.urandom(1024))
    (folder / "key-file").chmod(0o600)
    files = [f"--{option}={folder / option}" for option in ("key-file", "socket", "pid-file", "log-file", "seed-file")]
    munged = ["munged", "--force", "--foreground", *files]
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    daemons = []
    try:
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c"]):
            daemons.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            time.sleep(2)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=60)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_job_is_stopped_by_its_time_limit_requeued_and_ends_as_if_it_had_never_stopped(bench, tmp_path, cluster):
    preset, _ = write_accelerate_yaml(tmp_path, "fsdp2_cpu", FP32)
    whole = bench.run("whole", **CHANGES)

    def ask(*words: str) -> str:
        return subprocess.run(words, cwd=REPOSITORY, env=cluster | environment, text=True, capture_output=True, check=True).stdout

    environment = {
        "PATH": f"{Path(sys.executable).parent}:{cluster['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TOOLKIT_ACCELERATE_YAML": str(preset),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    size = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0"]
    script = [str(REPOSITORY / "tests/slurm/paced_t5.py"), *bench.flags("run", **CHANGES)]
    printed_to = tmp_path / "printed"
    job = ask("sbatch", "--parsable", f"--output={printed_to}", *size, *LIMITS, "docs/launch/slurm.sbatch", *script).strip()

    give_up_at, states = time.monotonic() + TIMEOUT_S - 200, [""]
    while states[-1] not in ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"):
        assert time.monotonic() < give_up_at, (states, printed_to.read_text())
        time.sleep(1)
        shown = ask("scontrol", "show", "job", job)
        state = re.findall(r"JobState=(\w+)", shown)[0]
        if state != states[-1]:
            states.append(state)
        if state == "PENDING" and "Restarts=0" not in shown:
            ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM waits two minutes before it starts a job again
    printed = printed_to.read_text()
    assert states[-1] == "COMPLETED", (states, printed)
    stops = re.findall(r"stopped by SIGUSR1 (?:after step \d+, with a checkpoint|outside of the training steps)", printed)
    assert 1 <= len(stops) <= 3 and f"Restarts={len(stops)}" in shown, (states, printed)

    for kind, figures in {"train": ("step", "loss", "grad_norm"), "eval": ("step", "loss")}.items():
        run, expected = (bench.lines(name, kind) for name in ("run", "whole"))
        assert [[line[figure] for figure in figures] for line in run] == [
            [line[figure] for figure in figures] for line in expected
        ]
    run, expected = ((bench.runs / name / "export" / "model.safetensors").read_bytes() for name in ("run", "whole"))
    assert run == expected, whole
