"""`make gpu` reads its checks from the docs, runs each, and judges it by its exit status and the line that is expected."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu_first_run import DOC, Check, format_report, read_checks, run_check
from benchmarks.measuring import REPOSITORY
from benchmarks.throughput import shape_times
from benchmarks.throughput.mfu import find_peak

NEW_GPU = (9, 0)


def test_the_page_has_at_most_20_checks_in_order() -> None:
    checks = read_checks(DOC.read_text(encoding="utf-8"))
    assert [check.number for check in checks] == list(range(1, len(checks) + 1)) and 10 <= len(checks) <= 20
    assert {check.num_gpus for check in checks} == {1, 2, 4} and (8, 9) in {check.capability for check in checks}
    assert all(check.command.startswith(("accelerate launch ", "python -m ")) and check.expected for check in checks)


def test_pytest_prints_the_line_to_expect() -> None:
    """Up to one -q (_pytest/terminal.py:summary_stats), and pyproject.toml has it."""
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    checks = [check for check in read_checks(DOC.read_text(encoding="utf-8")) if "pytest" in check.command]
    assert checks and all(f"{check.command} {options['addopts']}".split().count("-q") <= 1 for check in checks)


def test_shapes_are_timed_with_and_without_cudnn_and_print_the_line_to_expect() -> None:
    (check,) = [check for check in read_checks(DOC.read_text(encoding="utf-8")) if "shape_times" in check.command]
    seen = set()

    def attend(device: torch.device, length: int) -> float:
        seen.add((length, torch.backends.cuda.cudnn_sdp_enabled()))
        return real(device, length)

    real = shape_times.attend
    with patch.object(shape_times, "attend", attend):
        lines = [
            shape_times.describe(
                *shape_times.measure(torch.device("cpu"), allowed=allowed, lengths=range(16, 32, 8)), allowed=allowed
            )
            for allowed in (True, False)
        ]
    assert seen == {(length, allowed) for length in (8, 16, 24) for allowed in (True, False)}
    assert [check.is_printed(line) for line in lines] == [False, True]


def test_the_report_has_what_each_check_wrote_also_into_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "older.md").write_text("# An older one")
    os.utime(tmp_path / "older.md", (0, 0))
    checks = [Check(n, f"part {n}", 1, (8, 0), f"echo '# Table of {n}' > {tmp_path}/mfu.md; echo ok", "ok") for n in (1, 2)]
    report = format_report([run_check(check, 1, NEW_GPU, tmp_path) for check in checks], 1)
    assert "## Table of 1\n" in report and "## Table of 2\n" in report and "older" not in report


@pytest.mark.parametrize(
    ("command", "expected", "verdict", "line"),
    [
        ("echo noise; echo '  all 32 proven'", "all N proven", "passed", "all 32 proven"),
        ("echo all 3x proven", "all N proven", "FAILED", "it did not print `all N proven`"),
        ("echo all 32 proven; exit 3", "all N proven", "FAILED", "it exited with 3"),
        ("echo '3 passed, 1 skipped in 2.0s (N.)' >&2", "N passed…", "passed", "3 passed, 1 skipped in 2.0s (N.)"),
        ("python -c 'import toolkit; print(toolkit.__name__)'", "toolkit", "passed", "toolkit"),
    ],
)
def test_a_check_passes_by_exit_status_and_line(command: str, expected: str, verdict: str, line: str) -> None:
    outcome = run_check(Check(1, "it works", 1, (8, 0), command, expected), 1, NEW_GPU)
    assert (outcome.verdict, outcome.line) == (verdict, line)


def test_what_the_machine_cannot_run_is_left_out_and_a_failure_shows_its_end() -> None:
    two, new, failing = (
        Check(1, "two", 2, (8, 0), "false", "x"), Check(2, "new", 1, (10, 0), "false", "x"),
        Check(3, "failing", 1, (8, 0), "echo why; false", "x"),
    )  # fmt: skip
    outcomes = [run_check(check, 1, NEW_GPU) for check in (two, new, failing)]
    assert [outcome.verdict for outcome in outcomes] == ["left out", "left out", "FAILED"]
    report = format_report(outcomes, 1)
    assert "| 1 | two | left out | 0 s | it needs 2 GPUs, torch sees 1 |" in report
    assert report.endswith("## The end of check 3\n\n`echo why; false`\n\n```text\nwhy\n```\n")


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GH200 480GB", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121), ("NVIDIA L40", None), ("NVIDIA A10G", None), ("NVIDIA RTX A1000", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_gpu_and_not_of_one_with_a_longer_name(gpu: str, peak: int | None) -> None:
    assert find_peak(gpu) == peak
