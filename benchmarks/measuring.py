"""What every benchmark needs: run a side in a process of its own, read its figures, name the machine, lay out a table."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
Figures = dict[str, float]


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    stdout: str
    peak_memory_gib: float
    """Largest resident memory of any one of its processes."""

    @property
    def figures(self) -> dict[str, Any]:
        """What it printed last, as one line of JSON, and its peak memory."""
        return json.loads(self.stdout.splitlines()[-1]) | {"peak_memory_gib": self.peak_memory_gib}


def side_environment(num_threads: int) -> dict[str, Any]:
    """Arguments of `Popen` for a side: from the repository's root, each of its processes with `num_threads` threads."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return {"env": environment, "cwd": REPOSITORY}


def run_side(command: Sequence[str | Path], *, num_threads: int) -> Finished:
    """Run one side of a comparison from the repository's root, each of its processes with `num_threads` threads.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen([str(part) for part in command], stdout=stdout, stderr=stderr, **side_environment(num_threads))
        # wait4 tells the peak of this child and of its own children, whichever is larger, and of no other run's.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} exited with {process.returncode}:\n{stderr.read()[-3000:]}")
        return Finished(stdout.read(), usage.ru_maxrss / 2**20)  # kB on Linux


def run_script(
    script: str | Path, arguments: Sequence[str | Path], *, preset: str | None = None, num_processes: int = 1
) -> Finished:
    """`run_side` of a script that shares this machine's cores among its processes.

    Args:
        preset: name of an accelerate YAML to launch it with, in bf16 as on GPUs; None runs it in plain python.
        num_processes: of the launch; without a preset, how many such scripts share the cores.
    """
    precision = ["--mixed_precision", "bf16"]  # of memory and bytes; CPU presets compute in fp32
    accelerate = ["-m", "accelerate.commands.launch", *precision, "--num_processes", str(num_processes), "--config_file"]
    launch = [*accelerate, f"accelerate_configs/{preset}.yaml"] if preset else []
    return run_side([sys.executable, *launch, script, *arguments], num_threads=max(1, num_cores() // num_processes))


def run_worker(script: str | Path, config: dict[str, Any], file: Path, **launch: Any) -> dict[str, Any]:
    """`figures` of a script whose one argument is `file`, into which `config` is written as JSON; `launch` as `run_script`."""
    file.write_text(json.dumps(config, default=str))
    return run_script(script, [file], **launch).figures


def as_arguments(flags: dict[str, Any]) -> list[str]:
    """`--key=value` of dotted flags, as the recipes read them."""
    return [f"--{key}={_as_yaml(value)}" for key, value in flags.items()]


def summarize_steps(lines: list[dict[str, Any]]) -> Figures:
    """Figures of `train` lines of a recipe's `metrics.jsonl`, one a step: rows, tokens, and the loss of a label token."""
    num_label_tokens = sum(line["num_label_tokens"] for line in lines)
    return {
        "rows": sum(line["num_rows"] for line in lines),
        "tokens": sum(line["num_tokens"] for line in lines),
        "loss": sum(line["loss"] * line["num_label_tokens"] for line in lines) / num_label_tokens,
    }


def read_training(lines: list[dict[str, Any]], num_warmup_steps: int) -> Figures:
    """Speed and peak memory of the `train` lines of a recipe's `metrics.jsonl`, one a step, after the warm-up."""
    timed = [line for line in lines if line["kind"] == "train" and line["step"] > num_warmup_steps]
    seconds = sum(line["step_time_s"] for line in timed)
    return {
        "samples_per_s": sum(line["num_rows"] for line in timed) / seconds,
        "tokens_per_s": sum(line["num_tokens"] for line in timed) / seconds,
        "training_memory_gib": max(line["peak_memory_gib"] for line in timed),
    }


def interleave(measure: Callable[[str, str], Figures], sides: list[str], repetitions: int, part: str) -> dict[str, list[Figures]]:
    """Measure every side once a repetition; `measure` gets the side and a name for the run."""
    runs: dict[str, list[Figures]] = {side: [] for side in sides}
    for repetition in range(repetitions):
        for turn in range(len(sides)):
            side = sides[(turn + repetition) % len(sides)]
            runs[side].append(measure(side, f"{part}-{repetition}-{turn}"))
            print(f"{part} {repetition + 1}/{repetitions}, {side}: {json.dumps(runs[side][-1])}", flush=True)
    return runs


def median(figures: list[Figures], key: str) -> float:
    """Of the repetitions of a side."""
    return statistics.median(run[key] for run in figures)


def memory_gib(field: str) -> float:
    """Memory of this process, by its field in /proc/self/status: `VmRSS` resident, `RssAnon` anonymous, `VmHWM` peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 2**20


def restart_peak() -> None:
    """Forget this process's peak memory so far (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe_hardware() -> tuple[str, str]:
    """A name for file names (`2-cpu-cores`, `nvidia-h100`) and a sentence for the reader."""
    import torch

    cpu = f"{num_cores()} cores of {_cpu_model()}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
        return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-"), f"{gpu}, {cpu}"
    return f"{num_cores()}-cpu-cores", cpu


def describe_versions(packages: Sequence[str]) -> str:
    """`python 3.11.7, torch 2.13.0, …`."""
    return ", ".join(
        [f"python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
    )


def describe_command() -> str:
    """The command line that started this benchmark, without the folders of this machine."""
    module = Path(sys.argv[0]).resolve().relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
    return " ".join(["python -m", module, *sys.argv[1:]])


def format_spread(values: Sequence[float], digits: int = 1) -> str:
    """`min / median / max`."""
    return " / ".join(f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))


def format_runs(runs: list[Figures], key: str, digits: int = 1) -> str:
    """`format_spread` of one figure of the repetitions of a side."""
    return format_spread([run[key] for run in runs], digits)


def format_ratios(above: list[Figures], below: list[Figures], key: str, digits: int = 2) -> str:
    """`format_spread` of how many times a figure of one side is that of another, taken within a repetition."""
    return f"{format_spread([one[key] / other[key] for one, other in zip(above, below, strict=True)], digits)} ×"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def build_parser(description: str, *, parts: Sequence[str] = (), repetitions: int = 0) -> argparse.ArgumentParser:
    """The options that most drivers have: which `parts` to measure (all, unless said), and how often."""
    parser = argparse.ArgumentParser(description=description)
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    if repetitions:
        parser.add_argument("--repetitions", type=int, default=repetitions)
    return parser


def write_report(
    name: str, title: str, about: str, sections: Sequence[str], *, packages: Sequence[str], folder: Path = RESULTS
) -> None:
    """Write `<name>_<hardware>_<date>.md`: the command, hardware and versions of `packages`, then `about`, then the sections."""
    path = report_path(name, folder, "md")
    head = f"# {title}\n\n`{describe_command()}`\n\n{describe_hardware()[1]}; {describe_versions(packages)}{about}"
    path.write_text("\n\n".join([head, *sections]) + "\n")
    print(f"written to {path}")


def report_path(name: str, folder: Path, suffix: str) -> Path:
    """`<name>_<hardware>_<date>.<suffix>`."""
    return folder / f"{name}_{describe_hardware()[0]}_{datetime.date.today().isoformat()}.{suffix}"


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def _cpu_model() -> str:
    """The processor's name, from the kernel where it tells."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()
