"""`make gpu` reads its checks from the docs, runs each, and judges it by its exit status and the line that is expected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_first_run import DOC, FREE_GIB, Check, find_refusal, format_report, main, read_checks, run_check

NEW_GPU = (9, 0)


def test_the_page_has_at_most_20_checks_in_order() -> None:
    checks = read_checks(DOC.read_text(encoding="utf-8"))
    assert [check.number for check in checks] == list(range(1, len(checks) + 1)) and 10 <= len(checks) <= 20
    assert {check.num_gpus for check in checks} == {1, 2, 4} and (8, 9) in {check.capability for check in checks}
    assert all(check.command.startswith(("accelerate launch ", "python -m ")) and check.expected for check in checks)


def test_the_report_has_what_each_check_wrote_also_into_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "older.md").write_text("# An older one")
    os.utime(tmp_path / "older.md", (0, 0))
    checks = [Check(n, f"part {n}", 1, (8, 0), f"echo '# Table of {n}' > {tmp_path}/mfu.md; echo ok", "ok") for n in (1, 2)]
    report = format_report([run_check(check, 1, NEW_GPU, tmp_path) for check in checks], 1)
    assert "## Table of 1\n" in report and "## Table of 2\n" in report and "older" not in report


def test_the_checks_need_what_is_free_and_gpus_that_torch_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older driver the script died with a traceback."""
    assert f"needs {FREE_GIB} GiB" in DOC.read_text(encoding="utf-8")
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
