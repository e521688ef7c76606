"""`make gpu` reads its checks from the docs, runs each, and judges it by its exit status and the line that is expected."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu_first_run import DOC, FREE_GIB, Check, find_refusal, format_report, main, read_checks, run_check
from benchmarks.measuring import REPOSITORY
from benchmarks.plan import plan_error
from benchmarks.throughput import mfu, shape_times
from toolkit.tools.report.terminal import format_table
from toolkit.tracking.flops import find_peak_tflops

NEW_GPU = (9, 0)
CHECKS = {check.number: check for check in read_checks(DOC.read_text(encoding="utf-8"))}
PYTEST_GOOD, PROVEN = ("13 passed, 2 skipped in 61.02s (0:01:01)", 0), ("all 57 proven", 0)
MET, MISSED, UNMEASURED = (
    plan_error.judge([], [["T5-large full, bf16", "20.1", "20.4", error], ["T5-large, checkpointing", "", "not measured", ""]])
    for error in ("-1.47 %", "+7.10 %", "")
)
OUTPUTS: dict[int, tuple[tuple[str, int], tuple[str, int]]] = {
    1: (
        ("1 process on NVIDIA H100 80GB HBM3 (79.2 GiB) with 16 threads; attention: sdpa, the flash kernel", 0),
        ("1 process on the CPU (16 cores) with 16 threads; attention: sdpa", 0),
    ),
    2: (PYTEST_GOOD, ("15 skipped in 0.31s", 0)),
    3: (PYTEST_GOOD, ("14 skipped, 14 deselected in 2.10s", 0)),
    4: (PYTEST_GOOD, ("1 failed, 1 passed in 41.31s", 1)),
    5: (PYTEST_GOOD, ("2 failed in 35.02s", 1)),
    6: (PYTEST_GOOD, ("3 skipped in 0.22s", 0)),
    7: ((format_table({"step 300": {"loss": 2.113, "rougeL": 21.7}}), 0), ("step 300/300, loss 2.113, 210,113 tokens/s", 0)),
    8: (PROVEN, ("FAILED: loss, gradients", 1)),
    9: (PROVEN, ("FAILED: resume; not reached: export", 1)),
    10: (PROVEN, ("error: --presets names fsdp2_offload, which cannot run here", 2)),
    11: ((MET, 0), (MISSED, 0)),
    12: ((MET, 0), (UNMEASURED, 0)),
    13: ((MET, 0), ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.", 1)),
    14: ((mfu.judge(["40.6%"]), 0), ("FAILED: an MFU of 113.0 % is impossible", 1)),
    15: ((mfu.judge(["31.2%"]), 0), ("written to benchmarks/results/mfu_nvidia-h100_2026-11-23.md", 0)),
    16: (
        (shape_times.describe(412, 398, allowed=False), 0),
        (shape_times.describe(61_204, 371, allowed=True), 0),
    ),
}
"""For each check, what it prints at its end and its exit status, where it went well and where it did not."""


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


@pytest.mark.parametrize("number", CHECKS)
def test_a_check_tells_a_good_output_from_a_bad_one(number: int, tmp_path: Path) -> None:
    verdicts = []
    for text, rc in OUTPUTS[number]:
        (tmp_path / "output.txt").write_text(f"a line before\n{text}\n")
        printed = dataclasses.replace(CHECKS[number], command=f"cat {tmp_path / 'output.txt'}; exit {rc}")
        verdicts.append(run_check(printed, 8, NEW_GPU, tmp_path).verdict)
    assert verdicts == ["passed", "FAILED"]


def test_an_mfu_that_no_gpu_can_have_is_no_result() -> None:
    assert mfu.judge(["40.6%", "-"]) == "2 measured, MFU 40.6%, -"
    for cells, why in ((["40.6%", "113.0%"], "an MFU of 113.0 % is impossible"), ([], "nothing was measured")):
        with pytest.raises(SystemExit, match=why):
            mfu.judge(cells)


def test_the_checks_need_what_is_free_and_gpus_that_torch_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older driver the script died with a traceback; the page named 60 GiB where 120 were written."""
    base_gib = 2 * sum(weight.numel() for weight in mfu.build_model(mfu.GPU_CASES[0], "meta").parameters()) / 2**30
    assert base_gib < FREE_GIB - 4 and f"needs {FREE_GIB} GiB" in DOC.read_text(encoding="utf-8")
    assert find_refusal(tmp_path / "none") == f"--folder {tmp_path / 'none'} is not a folder"
    for free_gib, why in ((FREE_GIB - 1, f"{tmp_path} has 19 GiB free, and the checks need 20: name another"), (FREE_GIB, "old")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free_gib=free_gib: SimpleNamespace(free=free_gib * 2**30))
        monkeypatch.setattr("toolkit.launch.environment.why_no_gpu", lambda: "old driver")
        assert find_refusal(tmp_path).startswith(why)
    monkeypatch.setattr("sys.argv", ["gpu_first_run", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: old driver"):
        main()


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
    assert find_peak_tflops(gpu) == peak
