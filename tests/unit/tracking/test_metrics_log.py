"""The record of a run, and its progress lines."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from toolkit.errors import UserError
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking import metrics_log as tracking
from toolkit.tracking.metrics_log import MetricsLog


def test_a_line_is_whole_json_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, is_writer=True)
    log.write("train", 3, loss=0.1 + 0.2, num_rows=16, note="Zürich")
    # Read while the log is still open: nothing waits in a buffer, and the float keeps every digit.
    assert load_json_lines(path, skip_torn_end=True) == [
        {"kind": "train", "step": 3, "loss": 0.30000000000000004, "num_rows": 16, "note": "Zürich"}
    ]


def test_figures_that_json_does_not_know(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("train", 1, loss=float("nan"), grad_norm=float("inf"), low=float("-inf"), fine=1.0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    figures = json.loads(line, parse_constant=pytest.fail)
    assert figures["loss"] is None and figures["loss_is"] == "nan"
    assert figures["grad_norm"] is None and figures["grad_norm_is"] == "inf"
    assert figures["low"] is None and figures["low_is"] == "-inf"
    assert figures["fine"] == 1.0 and "fine_is" not in figures


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=False)
    log.write("train", 1, loss=1.0)
    log.truncate_after(0)
    assert list(tmp_path.iterdir()) == []


def test_resume_drops_later_steps_and_a_torn_line_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, is_writer=True)
    for step in (1, 2, 3):
        log.write("train", step, loss=float(step))
    log.write("checkpoint", 2)
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    before = path.read_bytes().splitlines(keepends=True)

    log = MetricsLog(path, is_writer=True)
    log.truncate_after(2)
    log.write("train", 3, loss=0.5)
    assert path.read_bytes().splitlines(keepends=True)[:3] == [before[0], before[1], before[3]]
    assert load_json_lines(path, skip_torn_end=True)[3:] == [{"kind": "train", "step": 3, "loss": 0.5}]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_starts_over_drops_all_its_lines_and_row_ids(tmp_path):
    for name in ("metrics.jsonl", "rows-00000.jsonl", "rows-00001.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(4)))
    (tmp_path / "predictions-3.jsonl").write_text("kept")
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.truncate_after(1)
    for name in ("metrics.jsonl", "rows-00000.jsonl", "rows-00001.jsonl"):
        assert [line["step"] for line in load_json_lines(tmp_path / name, skip_torn_end=True)] == [0, 1]
    log.truncate_after(-1)
    assert sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir()) == [
        ("metrics.jsonl", 0),
        ("predictions-3.jsonl", 4),
        ("rows-00000.jsonl", 0),
        ("rows-00001.jsonl", 0),
    ]


def test_a_torn_line_never_joins_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tra')
    assert load_json_lines(path, skip_torn_end=True) == [{"kind": "train", "step": 1}]
    MetricsLog(path, is_writer=True).write("train", 2)
    assert [line["step"] for line in load_json_lines(path, skip_torn_end=True)] == [1, 2]


def test_a_crash_while_truncating_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, is_writer=True)
    log.write("train", 1)
    log.write("train", 2)
    before = path.read_bytes()

    def crash(*_paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(tracking.os, "replace", crash)
    with pytest.raises(UserError, match=f"^{path} cannot be used \\(no space\\): fix that"):
        log.truncate_after(1)
    assert path.read_bytes() == before


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        load_json_lines(path, skip_torn_end=True)


def test_an_evaluation_that_is_still_due_has_one_line(tmp_path):
    """Stopped in the evaluation at step 2, it was done by a run that was killed before its next checkpoint."""
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    for kind, step in (("eval", 1), ("train", 2), ("eval", 2), ("train", 3)):
        log.write(kind, step)
    log.truncate_after(2, evaluation_due=True)
    assert [(line["kind"], line["step"]) for line in load_json_lines(log.path, skip_torn_end=True)] == [("eval", 1), ("train", 2)]


def test_a_full_disk_is_remembered_and_nothing_torn_is_read(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("train", 1)

    class AlmostFull:
        def write(self, text: bytes) -> int:
            return (tmp_path / "metrics.jsonl").open("ab").write(text[:7])

    monkeypatch.setattr(log, "_file", AlmostFull())
    log.write("train", 2)
    log.write("train", 3)
    assert "metrics.jsonl cannot be written (No space left on device)" in str(log.error)
    assert [line["step"] for line in load_json_lines(log.path, skip_torn_end=True)] == [1]


def replace(path):
    path.unlink()
    path.write_text('{"kind": "train", "step": 9}\n')


HAPPENS = {
    "removed": lambda path: path.unlink(),
    "removed with its folder": lambda path: shutil.rmtree(path.parent),
    "replaced": replace,
    "cut": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("happens", HAPPENS)
def test_what_happens_to_the_file_is_noticed_by_the_next_write(tmp_path, capsys, happens):
    folder = tmp_path / "run"
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl", is_writer=True, restore_folder=lambda: folder.mkdir(exist_ok=True))
    log.write("train", 1, loss=2.0)
    HAPPENS[happens](log.path)
    log.write("train", 2, loss=1.0)
    log.write("eval", 2, loss=1.0)
    lines = load_json_lines(log.path, skip_torn_end=True)
    assert [line["step"] for line in lines] == [9] * (happens == "replaced") + [2, 2]
    assert log.error is None and log.load() == lines
    said = f"{log.path} was removed or changed during the run: figures that it no longer has are lost"
    assert capsys.readouterr().err == f"WARNING: {said}\n"


def test_a_line_that_was_cut_in_two_costs_no_other_one(tmp_path, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("train", 1)
    os.truncate(log.path, 5)
    log.write("train", 2)
    assert [line["step"] for line in log.load()] == [2]
    assert "WARNING: 1 lines of" in capsys.readouterr().err


@pytest.mark.parametrize("work", [lambda log: log.write("train", 2), lambda log: log.load()])
def test_a_folder_that_another_run_has_taken_is_left_to_it(tmp_path, work):
    def refuse():
        raise UserError("another run is writing into it")

    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True, restore_folder=refuse)
    replace(log.path)
    work(log)
    assert str(log.error) == "another run is writing into it"
    assert log.path.read_text() == '{"kind": "train", "step": 9}\n'
    with pytest.raises(UserError, match="another run is writing into it"):
        log.truncate_after(0)


def test_a_foreign_line_costs_no_other_one(tmp_path, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("train", 1, loss=2.0)
    with log.path.open("a") as file:
        file.write("# a note\n")
    log.write("train", 2, loss=1.0)
    assert [line["step"] for line in log.load()] == [1, 2]
    assert capsys.readouterr().err == f"WARNING: 1 lines of {log.path} were changed or added during the run and are left out\n"
