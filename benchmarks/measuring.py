"""What every benchmark needs: run a side in a process of its own, name the machine, lay out a table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    stdout: str
    peak_memory_gib: float
    """Largest resident memory of any one of its processes."""


def run_side(command: Sequence[str | Path], *, num_threads: int) -> Finished:
    """Run one side of a comparison from the repository's root, each of its processes with `num_threads` threads.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen([str(part) for part in command], stdout=stdout, stderr=stderr, env=environment, cwd=REPOSITORY)
        # wait4 tells the peak of this child and of its own children, whichever is larger, and of no other run's.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} exited with {process.returncode}:\n{stderr.read()[-3000:]}")
        return Finished(stdout.read(), usage.ru_maxrss / 2**20)  # kB on Linux


def describe_hardware() -> tuple[str, str]:
    """A name for file names (`2-cpu-cores`, `nvidia-h100`) and a sentence for the reader."""
    import torch

    num_cores = len(os.sched_getaffinity(0))
    cpu = f"{num_cores} cores of {_cpu_model()}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
        return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-"), f"{gpu}, {cpu}"
    return f"{num_cores}-cpu-cores", cpu


def describe_versions(packages: Sequence[str]) -> str:
    """`python 3.11.7, torch 2.13.0, …`."""
    return ", ".join(
        [f"python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
    )


def describe_command() -> str:
    """The command line that started this benchmark, without the folders of this machine."""
    return " ".join(["python", Path(sys.argv[0]).resolve().relative_to(REPOSITORY).as_posix(), *sys.argv[1:]])


def format_spread(values: Sequence[float], digits: int = 1) -> str:
    """`min / median / max`."""
    return " / ".join(f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def today() -> str:
    """The date in results' names: 2025-01-31."""
    return datetime.date.today().isoformat()


def _cpu_model() -> str:
    """The processor's name, from the kernel where it tells."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()
