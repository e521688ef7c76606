"""`make gpu`: runs the checks of `docs/gpu_first_run.md`, one after the other, and writes one report file.

python -m benchmarks.gpu_first_run
python -m benchmarks.gpu_first_run --folder /scratch
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import REPOSITORY, RESULTS, describe_hardware, describe_versions

PACKAGES = ["torch", "accelerate", "transformers", "datasets", "peft"]
DOC = REPOSITORY / "docs" / "gpu_first_run.md"
FREE_GIB = 20
"""Free disk that the checks need: the base of check 14 takes 15."""
NUM_LINES_KEPT = 40
"""Of the end of a failed check's output."""


@dataclass(frozen=True)
class Check:
    """One row of the table in `docs/gpu_first_run.md`."""

    number: int
    title: str
    num_gpus: int
    capability: tuple[int, int]
    """Least compute capability."""
    command: str
    expected: str
    """The line to expect; `N` is any number, `…` any text."""

    def is_printed(self, line: str) -> bool:
        """Whether `line` is the one to expect."""
        pattern = re.escape(self.expected).replace("…", ".*")
        return re.fullmatch(re.sub(r"\bN\b", "[0-9]+", pattern), line.strip()) is not None


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    check: Check
    verdict: str
    """`passed`, `FAILED` or `left out`."""
    line: str
    """The line that was expected, or the reason."""
    seconds: float = 0.0
    output: str = ""
    """Its end, if it failed."""
    tables: tuple[str, ...] = ()
    """The results files that it wrote. The next check may write the same ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the checks of docs/gpu_first_run.md and write one report.")
    parser.add_argument("--report", type=Path, default=Path("gpu_report.md"))
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help=f"for temporary files, {FREE_GIB} GiB (TMPDIR)"
    )
    options = parser.parse_args()
    if refusal := find_refusal(options.folder):
        sys.exit(f"error: {refusal}")
    os.environ["TMPDIR"] = str(options.folder.absolute())
    import torch

    num_gpus = torch.cuda.device_count()
    capability = torch.cuda.get_device_capability() if num_gpus else (0, 0)
    outcomes: list[Outcome] = []
    for check in read_checks(DOC.read_text(encoding="utf-8")):
        print(f"{check.number:>2}. {check.title}", flush=True)
        outcomes.append(run_check(check, num_gpus, capability))
        print(f"    {outcomes[-1].verdict}: {outcomes[-1].line}", flush=True)
        options.report.write_text(format_report(outcomes, num_gpus), encoding="utf-8")
    print(f"the report is {options.report}")
    sys.exit(any(outcome.verdict == "FAILED" for outcome in outcomes))


def find_refusal(folder: Path) -> str:
    """Why no check can run here, in one sentence; empty if they can."""
    from toolkit.launch.environment import why_no_gpu

    if not folder.is_dir():
        return f"--folder {folder} is not a folder"
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < FREE_GIB:
        return f"{folder} has {free_gib:.0f} GiB free, and the checks need {FREE_GIB}: name another folder with --folder"
    return why_no_gpu()


def read_checks(text: str) -> list[Check]:
    """The rows of the table."""
    checks = []
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if cells[0].isdigit():
            number, title, gpus, command, expected = cells
            num_gpus, _, capability = gpus.partition(", ")
            major, _, minor = (capability or "8.0").partition(".")
            checks.append(Check(int(number), title, int(num_gpus), (int(major), int(minor)), command, expected))
    return checks


def run_check(check: Check, num_gpus: int, capability: tuple[int, int], results: Path = RESULTS) -> Outcome:
    """Run one check from the repository's root with this Python's own commands first on the path; its output is shown."""
    if num_gpus < check.num_gpus:
        return Outcome(check, "left out", f"it needs {check.num_gpus} GPUs, torch sees {num_gpus}")
    if capability < check.capability:
        return Outcome(check, "left out", f"it needs compute capability {check.capability}, this GPU has {capability}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    start_s, last, found = time.time(), deque[str](maxlen=NUM_LINES_KEPT), ""
    process = subprocess.Popen(
        ["bash", "-c", check.command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=REPOSITORY, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        print(f"    | {line}", end="", flush=True)
        last.append(line)
        found = line.strip() if check.is_printed(line) else found
    rc, seconds = process.wait(), time.time() - start_s
    written = sorted(path for path in results.glob("*.md") if path.stat().st_mtime >= start_s)
    tables = tuple(path.read_text(encoding="utf-8") for path in written)
    if rc == 0 and found:
        return Outcome(check, "passed", found, seconds, tables=tables)
    reason = f"it exited with {rc}" if rc else f"it did not print `{check.expected}`"
    return Outcome(check, "FAILED", reason, seconds, "".join(last), tables)


def format_report(outcomes: list[Outcome], num_gpus: int) -> str:
    """The machine, a table of the checks, the results files that they wrote, and the ends of failed ones."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    rows = [f"| {o.check.number} | {o.check.title} | {o.verdict} | {o.seconds:.0f} s | {o.line} |" for o in outcomes]
    failed = [o for o in outcomes if o.verdict == "FAILED"]
    parts = [
        "# Report of `make gpu`",
        f"{num_gpus} GPUs: {describe_hardware()[1]}; {describe_versions(PACKAGES)}; commit {commit or 'unknown'}",
        "\n".join(["| # | what | verdict | time | line |", "|---|---|---|---|---|", *rows]),
        *(table.replace("# ", "## ", 1) for outcome in outcomes for table in outcome.tables),
        *(f"## The end of check {o.check.number}\n\n`{o.check.command}`\n\n```text\n{o.output}```" for o in failed),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
