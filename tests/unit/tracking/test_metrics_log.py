"""The record of a run, and its progress lines."""

import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.refusals import refusal
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.files.json_lines import load_json_lines
from toolkit.objectives.causal import Causal
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.tracking import metrics_log as tracking
from toolkit.tracking.metrics_log import MetricsLog, StepMemory, save_memory


def test_a_line_is_whole_json_as_soon_as_it_is_written_also_with_figures_that_json_does_not_know(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    figures = {"loss": float("nan"), "grad_norm": float("inf"), "low": float("-inf"), "fine": 0.1 + 0.2}
    log.write("train", 3, **figures, note="Zürich")
    # Read while the log is still open: nothing waits in a buffer, and the float keeps every digit.
    (line,) = log.path.read_text().splitlines()
    kinds = {"loss": None, "loss_is": "nan", "grad_norm": None, "grad_norm_is": "inf", "low": None, "low_is": "-inf"}
    expected = {"kind": "train", "step": 3, **kinds, "fine": 0.30000000000000004, "note": "Zürich"}
    assert json.loads(line, parse_constant=pytest.fail) == expected
    other = MetricsLog(tmp_path / "other" / "metrics.jsonl", is_writer=False)
    other.write("train", 1, loss=1.0)
    other.truncate_after(0)
    assert list(tmp_path.iterdir()) == [log.path], "other ranks write nothing"


def test_resume_drops_later_steps_and_a_torn_line_and_goes_on(tmp_path):
    """Also of row ids; and the evaluation at its step, if that is still due: stopped in it, it was done by a run that was
    killed before its next checkpoint."""
    path, *rows = (tmp_path / f"{name}.jsonl" for name in ("metrics", "rows-00000", "rows-00001"))
    for of_file, num_steps in zip(rows, (3, 4), strict=True):  # of the first, all stay
        of_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(num_steps)))
    (tmp_path / "predictions-3.jsonl").write_text("kept")
    log = MetricsLog(path, is_writer=True)
    for kind, step in (("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("checkpoint", 2)):
        log.write(kind, step)
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    before = path.read_bytes().splitlines(keepends=True)
    log = MetricsLog(path, is_writer=True)
    log.write("train", 4)
    assert [line["step"] for line in load_json_lines(path, skip_torn_end=True)] == [1, 2, 2, 3, 2, 4], "torn ends join nothing"
    log.truncate_after(2, evaluation_due=True)
    log.write("train", 3)
    assert path.read_bytes().splitlines(keepends=True) == [before[0], before[1], before[4], before[3]]
    assert [[line["step"] for line in load_json_lines(of_file, skip_torn_end=True)] for of_file in rows] == [[0, 1, 2]] * 2
    log.truncate_after(-1)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {
        "metrics.jsonl": 0, "predictions-3.jsonl": 4, "rows-00000.jsonl": 0, "rows-00001.jsonl": 0,
    }  # fmt: skip


def test_on_a_full_disk_the_old_file_stays_and_nothing_torn_is_read(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, is_writer=True)
    log.write("train", 1)
    log.write("train", 2)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tracking.os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(UserError, match=f"^{path} cannot be used \\(no space\\): fix that"):
            log.truncate_after(1)
    assert path.read_bytes() == before

    class AlmostFull:
        def write(self, text: bytes) -> int:
            return path.open("ab").write(text[:7])

    log = MetricsLog(path, is_writer=True)
    monkeypatch.setattr(log, "_file", AlmostFull())
    log.write("train", 3)
    log.write("train", 4)
    assert "metrics.jsonl cannot be written (No space left on device)" in str(log.error)
    assert [line["step"] for line in load_json_lines(path, skip_torn_end=True)] == [1, 2]


def replace(path):
    path.unlink()
    path.write_text('{"kind": "train", "step": 9}\n')


@pytest.mark.parametrize(
    "happens", [Path.unlink, lambda path: shutil.rmtree(path.parent), replace, lambda path: os.truncate(path, 0)]
)
def test_what_happens_to_the_file_is_noticed_by_the_next_write(tmp_path, capsys, happens):
    folder = tmp_path / "run"
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl", is_writer=True, restore_folder=lambda: folder.mkdir(exist_ok=True))
    log.write("train", 1, loss=2.0)
    happens(log.path)
    log.write("train", 2, loss=1.0)
    log.write("eval", 2, loss=1.0)
    lines = load_json_lines(log.path, skip_torn_end=True)
    assert [line["step"] for line in lines] == [9] * (happens is replace) + [2, 2]
    assert log.error is None and log.load() == lines
    said = f"{log.path} was removed or changed during the run: figures that it no longer has are lost"
    assert capsys.readouterr().err == f"WARNING: {said}\n"


def test_a_line_that_was_cut_in_two_or_is_foreign_costs_no_other_one(tmp_path, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("train", 1)
    os.truncate(log.path, 5)
    log.write("train", 2)
    with log.path.open("a") as file:
        file.write("# a note\n")
    log.write("train", 3)
    assert [line["step"] for line in log.load()] == [2, 3]
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: not JSON"):
        load_json_lines(log.path, skip_torn_end=True)
    assert capsys.readouterr().err.endswith(
        f"WARNING: 2 lines of {log.path} were changed or added during the run and are left out\n"
    )


@pytest.mark.parametrize("work", [lambda log: log.write("train", 2), lambda log: log.load()])
def test_a_folder_that_another_run_has_taken_is_left_to_it(tmp_path, work):
    def refuse():
        raise UserError("another run is writing into it")

    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True, restore_folder=refuse)
    replace(log.path)
    work(log)
    assert str(log.error) == "another run is writing into it"
    assert log.path.read_text() == '{"kind": "train", "step": 9}\n'
    assert "another run is writing into it" in refusal(log.truncate_after, 0)


def test_the_peak_starts_anew_where_the_system_lets_it():
    memory = StepMemory(torch.device("cpu"))
    memory.restart()
    before_gib = memory.read()
    held = torch.ones(2**26)  # 256 MiB
    assert memory.read() >= before_gib + 0.2
    del held
    memory.restart()
    assert memory.read() < before_gib + 0.2
    assert memory.peak_gib >= before_gib + 0.2


@pytest.mark.parametrize("one_row", [True, False])
def test_the_largest_micro_batch_is_remembered_by_its_tokens_and_packs_are_no_longer_than_they_are(one_row):
    """A plan of `make llm` was refused: the longest row has 1132 tokens, where packs have 512 at most."""
    packs = [[{"input_ids": [5] * length, "labels": [5] * length} for length in pack] for pack in ((300, 200), (512,), (100, 20))]
    batch = CausalCollator(pad_token_id=0, one_row=one_row).collate(packs)
    assert batch["input_ids"].shape == ((1, 1132) if one_row else (3, 512))
    memory = StepMemory(torch.device("cpu"))
    for rows, source, target in ((4, 10, 5), (2, 40, 20), (8, 10, 4)):
        tensors = {"input_ids": torch.zeros(rows, source), "decoder_input_ids": torch.zeros(rows, target)}
        memory.record_batch(Seq2Seq(), tensors, rows)
    assert (memory.num_rows, memory.row_tokens) == (2, {"source": 40, "target": 20})
    memory.record_batch(Causal(), batch, len(packs))
    assert (memory.num_rows, memory.row_tokens) == (3, {"row": 378 if one_row else 512})


@pytest.mark.parametrize("gpu_bytes", [None, 2**30])
def test_the_peak_of_gpus_is_printed_and_that_of_cpus_which_is_mostly_the_libraries_only_kept(
    tmp_path, caplog, monkeypatch, gpu_bytes
):
    monkeypatch.setattr("toolkit.tracking.metrics_log.smallest_gpu_bytes", lambda device: gpu_bytes)
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    save_memory(tmp_path, memory := StepMemory(torch.device("cpu")), log)
    assert not (tmp_path / "memory.json").exists(), "of a run without a step"
    memory.read()
    with caplog.at_level("INFO"):
        save_memory(tmp_path, memory, log)
    assert ("memory of training steps" in caplog.text) == (gpu_bytes is not None) and (tmp_path / "memory.json").exists()
