"""Run pytest commands one after the other, all of them whatever the earlier ones came to, and end with what failed.

    python -m tests.run "--numprocesses 2 tests/recipes" "tests/gpu"

Each argument holds those of one command. The last lines name the commands and tests that failed; the very last one counts all
tests as pytest does.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

COUNTED = ("failed", "passed", "skipped", "error")
"""In the order of pytest's closing line."""


def main(commands: list[str]) -> int:
    """Returns the exit code: 1 if any command failed."""
    start_s, counts, said = time.monotonic(), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        for command in commands:
            report = Path(folder) / "report.xml"
            flags = [f"--junitxml={report}", "-o", "junit_family=xunit1", *shlex.split(command)]
            code = _wait([sys.executable, "-m", "pytest", *flags])
            failed = _read_report(report, counts)
            report.unlink(missing_ok=True)
            if code:
                said += [f"FAILED, exit code {code}: pytest {command}", *failed]
    print("", *said, _closing_line(counts, time.monotonic() - start_s), sep="\n", flush=True)
    return 1 if said else 0


def _wait(command: list[str]) -> int:
    """Run it; Ctrl-C reaches it by the terminal, and ends this program once it has cleaned up."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise SystemExit(130) from None


def _read_report(report: Path, counts: Counter[str]) -> list[str]:
    """Add to the counts of what the tests came to; returns a line for each that did not pass."""
    lines: list[str] = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = [part.tag for part in case if part.tag in ("failure", "error", "skipped")] or ["passed"]
        counts.update({"failure": "failed"}.get(kind, kind) for kind in kinds)
        name = f"{case.get('file')}::{case.get('name')}" if case.get("file") else case.get("name")
        lines += [f"{'ERROR' if kind == 'error' else 'FAILED'} {name}" for kind in kinds if kind in ("failure", "error")]
    return lines


def _closing_line(counts: Counter[str], seconds: float) -> str:
    parts = [f"{counts[kind]} {kind}{'s' * (kind == 'error' and counts[kind] > 1)}" for kind in COUNTED if counts[kind]]
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
