"""`make gpu`: runs the parts of `docs/gpu_first_run.md` in order, and writes what they measure after each.

    python -m benchmarks.gpu                             # both lots for one GPU
    python -m benchmarks.gpu --parts presets t5-base     # these parts
    python -m benchmarks.gpu --lots third                # several GPUs
    python -m benchmarks.gpu --small                     # tiny models on a CPU: tries the parts, measures nothing

Each part is a process with a time limit. A second start goes on where the first one stopped: it leaves out what has passed with
the same toolkit on the same device. Exits with 1 if a part failed, with 2 if none can run.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import LEFT_OUT, MARK
from benchmarks.gpu.report import save_report
from benchmarks.measuring import REPOSITORY, RESULTS, describe_hardware, describe_versions

PACKAGES = ["torch", "accelerate", "transformers", "datasets", "peft"]
DOC = REPOSITORY / "docs" / "gpu_first_run.md"
LOTS = ("first", "second", "third")
FREE_GIB = 20
"""Free disk that the parts need: the weights of 8B take 15."""
NUM_LINES_KEPT = 40
"""Of the end of a failed part's output."""
GOOD = ("passed", "left out")


@dataclass(frozen=True)
class Part:
    """One row of the table in `docs/gpu_first_run.md`."""

    name: str
    lot: str
    settles: str
    num_gpus: int
    minutes: float
    """Estimated for an H200."""
    limit_minutes: float
    command: str


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for; the exit code."""
    parts = read_parts(DOC.read_text(encoding="utf-8"))
    options = parse_options(parts, arguments)
    if refusal := find_refusal(options):
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    path, result = load_or_begin(options)
    chosen = [part for part in parts if (part.name in options.parts if options.parts else part.lot in options.lots)]
    for part in chosen:
        if result["parts"].get(part.name, {}).get("verdict") == "passed":
            print(f"{part.name}: passed before with this toolkit, as {path} says", flush=True)
            continue
        print(f"{part.name}: {part.settles} (about {part.minutes:g} min, at most {part.limit_minutes:g})", flush=True)
        result["parts"][part.name] = run_part(part, options)
        save_report(result, path)
        print("    {verdict}, {seconds:.0f} s: {line}".format(**result["parts"][part.name]), flush=True)
    print(f"written to {path} and {path.with_suffix('.md').name}")
    return int(any(result["parts"][part.name]["verdict"] not in GOOD for part in chosen))


def parse_options(parts: list[Part], arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the parts of docs/gpu_first_run.md, and write one report.")
    parser.add_argument("--lots", nargs="+", choices=LOTS, default=LOTS[:2], help="the first two unless said: one GPU")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in parts], help="these parts, whatever their lot")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the parts on a CPU")
    parser.add_argument("--report", type=Path, help="folder of the report: benchmarks/results, or with --small that of --folder")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help=f"for weights and runs, {FREE_GIB} GiB (TMPDIR)"
    )
    options = parser.parse_args(arguments)
    options.folder = options.folder.absolute()
    options.report = options.report or (options.folder if options.small else RESULTS)
    return options


def find_refusal(options: argparse.Namespace) -> str:
    """Why no part can run here, in one sentence; empty if they can."""
    import torch

    from toolkit.launch.environment import why_no_gpu

    for name in ("folder", "report"):
        if not (folder := getattr(options, name)).is_dir():
            return f"--{name} {folder} is not a folder"
    if options.small:
        return ""
    free_gib = shutil.disk_usage(options.folder).free / 2**30
    if free_gib < FREE_GIB:
        return f"{options.folder} has {free_gib:.0f} GiB free, and the parts need {FREE_GIB}: name another folder with --folder"
    return why_no_gpu() or ("" if torch.cuda.is_available() else "torch sees no GPU here: --small tries the parts on a CPU")


def read_parts(text: str) -> list[Part]:
    """The rows of the table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [
        Part(name, lot, settles, int(num_gpus), float(minutes), float(limit), command.strip("`"))
        for name, lot, settles, num_gpus, minutes, limit, command in (row for row in rows if len(row) == 7 and row[1] in LOTS)
    ]


def load_or_begin(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The report of this device with the same toolkit, if there is one, else a new one."""
    slug, hardware = describe_hardware()
    kind, today, code = "gpu_small" if options.small else "gpu", datetime.date.today().isoformat(), hash_code()
    for path in options.report.glob(f"{kind}_{slug}_*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["code"] == code:
            return path, result
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True)
    result = {
        "title": f"Report of `make gpu`{', small: its figures say nothing' * options.small}",
        "about": f"{hardware}; {describe_versions(PACKAGES)}; commit {git.stdout.strip() or 'unknown'}, toolkit {code}, {today}.",
        "code": code, "parts": {},
    }  # fmt: skip
    return options.report / f"{kind}_{slug}_{today}_{code[:4]}.json", result


def hash_code() -> str:
    """Of the toolkit's sources and the presets, which the parts measure: a copy of a checkout has no commit."""
    paths = sorted([*(REPOSITORY / "toolkit").rglob("*.py"), *(REPOSITORY / "accelerate_configs").glob("*.yaml")])
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def run_part(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part from the repository's root, with this Python's own commands first on the path; how it ended, and its figures."""
    import torch

    told: dict[str, Any] = {"seconds": 0.0, "figures": [], "output": "", "command": part.command}
    if not options.small and torch.cuda.device_count() < part.num_gpus:
        return told | {"verdict": "left out", "line": f"it needs {part.num_gpus} GPUs, torch sees {torch.cuda.device_count()}"}
    own = f" --folder {shlex.quote(str(options.folder))}{' --small' * options.small}"
    command = part.command + own * part.command.startswith("python -m benchmarks.")
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(options.folder), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    start_s, code, limit_minutes = time.monotonic(), None, part.limit_minutes * (4 if options.small else 1)  # any CPU
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=REPOSITORY,
            env=environment, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                code = process.wait(60 * limit_minutes)
            finally:
                end_session(process)
        output.seek(0)
        lines = [line for line in output if line.strip()]
    told["figures"] = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    lines = [line for line in lines if not line.startswith(MARK)]
    told |= {"seconds": round(time.monotonic() - start_s, 1), "line": lines[-1].strip() if lines else ""}
    if code == 0 and told["line"].startswith(LEFT_OUT):
        return told | {"verdict": "left out", "line": told["line"].removeprefix(LEFT_OUT)}
    if code == 0:
        return told | {"verdict": "passed"}
    why = f"it exited with {code}" if code is not None else f"it took more than {limit_minutes:g} min"
    return told | {"verdict": "FAILED", "line": why, "output": "".join(lines[-NUM_LINES_KEPT:])}


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill what a command has started and left: launchers and ranks may lead sessions of their own."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part ends with its driver
    sys.exit(main())
