"""A stand-in for SLURM's `srun`: starts the tasks of a job in network namespaces and signals all their processes.

The namespaces are named in TEST_MACHINES. The job's variables are those that `sbatch` sets.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cpus-per-task", type=int, required=True)
    parser.add_argument("--kill-on-bad-exit", type=int, choices=[0], required=True)
    parser.add_argument("--wait", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    tasks_per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for number in range(int(os.environ["SLURM_NTASKS"])):
        node, local = divmod(number, tasks_per_node)
        task = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        command = ["ip", "netns", "exec", os.environ["TEST_MACHINES"].split()[node], *arguments.command]
        tasks.append(subprocess.Popen(command, env=os.environ | task, start_new_session=True))

    def pass_on(number: int, _: object) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)

    for name in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(name, pass_on)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)  # the highest, as srun's page says


if __name__ == "__main__":
    sys.exit(main())
