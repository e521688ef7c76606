"""`make gpu` reads its parts from the docs, runs each as a process with a limit, and goes on where it stopped."""

import argparse
import json
import time

import pytest
import torch

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu.__main__ import DOC, LOTS, Part, main, read_parts, run_part
from benchmarks.gpu.report import format_beside, format_report, format_speed
from benchmarks.measuring import RESULTS
from tests.support.launch import REPOSITORY

H200 = RESULTS / "gpu_nvidia-h200_2026-11.json"


def test_the_page_has_two_lots_of_five_minutes_for_one_gpu():
    text = DOC.read_text(encoding="utf-8")
    parts = read_parts(text)
    minutes = [round(sum(part.minutes for part in parts if part.lot == lot), 1) for lot in LOTS[:2]]
    assert max(minutes) <= 5 and f"the first lot is {minutes[0]} minutes, the second {minutes[1]}" in text
    assert [part.lot for part in parts] == sorted((part.lot for part in parts), key=LOTS.index)
    assert all(part.minutes < part.limit_minutes and (part.num_gpus == 1 or part.lot == "third") for part in parts)


@pytest.mark.parametrize(
    ("command", "num_gpus", "verdict", "line"),
    [
        ("echo noise; echo '8 passed'; echo 'FIGURES {\"table\": \"t\"}'", 0, "passed", "8 passed"),
        ("echo why >&2; exit 3", 0, "FAILED", "it exited with 3"),
        ("echo left out: no TRL", 0, "left out", "no TRL"),
        ("python -c 'import toolkit; print(toolkit.__name__)'", 0, "passed", "toolkit"),
        ("false", 2, "left out", "it needs 2 GPUs, torch sees 1"),
    ],
)
def test_a_part_is_judged_by_its_exit_status(command, num_gpus, verdict, line, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    part = Part("x", "first", "", num_gpus, 0, 1, command)
    told = run_part(part, argparse.Namespace(folder=tmp_path, small=num_gpus == 0))
    assert (told["verdict"], told["line"]) == (verdict, line)
    if verdict != "left out":
        assert told["figures"] == ([{"table": "t"}] if "FIGURES" in command else [])
        assert told["output"] == ("why\n" if verdict == "FAILED" else "")


def test_a_part_ends_at_its_limit_with_all_that_it_has_started(tmp_path):
    late = tmp_path / "late"
    command = f"setsid bash -c 'sleep 4; touch {late}' & echo 'FIGURES {{\"table\": \"t\"}}'; wait"
    told = run_part(Part("x", "first", "", 0, 0, 0.005, command), argparse.Namespace(folder=tmp_path, small=True))
    assert (told["verdict"], told["line"], told["figures"]) == ("FAILED", "it took more than 0.02 min", [{"table": "t"}])
    time.sleep(4)
    assert not late.exists()


def test_a_second_start_goes_on_where_the_first_one_stopped(tmp_path, monkeypatch, capsys):
    row = "| {} | first | it counts | 1 | 0.1 | 1 | `echo {} >>{}; {}` |"
    page, started = tmp_path / "page.md", tmp_path / "started"
    page.write_text(
        "\n".join(row.format(name, name, started, end) for name, end in (("a", "true"), ("b", "echo why; false"), ("c", "true")))
    )
    monkeypatch.setattr(driver, "DOC", page)
    arguments = ["--small", "--report", str(tmp_path), "--folder", str(tmp_path)]
    assert main(arguments) == 1 and main(arguments) == 1
    assert started.read_text().split() == ["a", "b", "c", "b"]
    assert "a: passed before with this toolkit" in capsys.readouterr().out
    monkeypatch.setattr(driver, "hash_code", lambda: "another toolkit")
    assert main([*arguments, "--parts", "a"]) == 0 and started.read_text().split()[-1] == "a"
    first = json.loads(next(path for path in tmp_path.glob("gpu_small_*.json") if "_anot" not in path.name).read_text())
    assert [part["verdict"] for part in first["parts"].values()] == ["passed", "FAILED", "passed"]
    assert "## The end of b" in format_report(first)


def test_the_pages_have_the_tables_of_the_report():
    """`python -m benchmarks.gpu.report FILE` prints them."""
    result = json.loads(H200.read_text(encoding="utf-8"))
    assert format_beside(result) in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert format_speed(result) in (REPOSITORY / "benchmarks/README.md").read_text(encoding="utf-8")
    assert H200.with_suffix(".md").read_text(encoding="utf-8") == format_report(result)
