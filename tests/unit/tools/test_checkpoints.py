"""`python -m toolkit checkpoints`."""

import io
import json
import os
import shutil
import sys

import pytest

from tests.support.checkpoint_files import change_manifest, make_checkpoint
from tests.support.workbench import call_toolkit
from toolkit.checkpoint.manifest import MANIFEST
from toolkit.tools import checkpoints as checkpoint_table


def test_one_row_for_each_checkpoint_and_leftover(tmp_path, capsys):
    for step, loss in ((3, 2.5), (6, 1.25), (9, None)):
        folder = make_checkpoint(tmp_path, step, loss)
        os.utime(folder / MANIFEST, (1e9, 1e9 + step))
    change_manifest(folder, lambda m: m["identity"]["config"].update({"eval.best_metric": "accuracy"}))
    change_manifest(folder, lambda m: m["metrics"].update(accuracy=0.5, perplexity=9.0))
    (folder / "state" / ".metadata").write_bytes(bytes(2**20))
    for leftover in ("step-00000012.tmp", "step-00000003.old", "step-00000001.removing"):
        shutil.copytree(tmp_path / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / leftover)
    assert call_toolkit("checkpoints", tmp_path) == 1
    header, *rows, hint = capsys.readouterr().out.splitlines()
    assert header.split() == ["MiB", "written", "processes", "loss", "accuracy"]
    assert [row.split()[0] for row in rows] == [
        "step-00000001.removing", "step-00000003", "step-00000003.old", "step-00000006", "step-00000009", "step-00000012.tmp",
    ]  # fmt: skip
    assert rows[1].split()[2] == "2001-09-09"
    assert [rows[1].split()[at] for at in (-4, -3, -2, -1)] == ["1", "2.50", "–", "valid"]
    assert rows[4].endswith("0.50  NOT VALID: state/.metadata has 1048576 bytes instead of 130") and " 1.0  " in rows[4]
    assert "leftover: half removed" in rows[0]
    assert "leftover: replaced by another of that step" in rows[2]
    assert "leftover: unfinished" in rows[5]
    assert hint.endswith("--verify hashes them too.")


def test_json_is_strict_and_holds_all_metrics(tmp_path, capsys):
    make_checkpoint(tmp_path, 3, loss=float("nan"))
    (make_checkpoint(tmp_path, 6) / MANIFEST).unlink()
    make_checkpoint(tmp_path, 9).rename(tmp_path / "checkpoints" / "step-00000009.tmp")
    assert call_toolkit("checkpoints", tmp_path, "--json") == 1
    nan, damaged, leftover = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (nan["step"], nan["valid"], nan["metrics"], nan["world_size"]) == (3, True, {"loss": None}, 1)
    assert (damaged["valid"], damaged["note"]) == (False, "has no manifest.json: it was never finished")
    assert (leftover["name"], leftover["is_checkpoint"], leftover["valid"]) == ("step-00000009.tmp", False, None)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda run: None, "{run} is not a folder: give the folder of a run"),
        (lambda run: run.mkdir(), "{run} has no checkpoints folder: give the folder of a run"),
        (lambda run: (run / "checkpoints").mkdir(parents=True), "{run}/checkpoints holds no checkpoint: let the run reach"),
        (
            lambda run: (run / "checkpoints" / "step-00000003.tmp").mkdir(parents=True),
            "{run}/checkpoints holds no checkpoint, only step-00000003.tmp: let the run reach",
        ),
    ],
)
def test_a_run_without_checkpoints_is_one_sentence(tmp_path, capsys, make, sentence):
    run = tmp_path / "run"
    make(run)
    assert call_toolkit("checkpoints", run) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence.format(run=run)}")


def test_a_changed_byte_is_reported_by_verify_alone_and_valid_ones_whatever_lies_beside_them(tmp_path, capsys, monkeypatch):
    stray = make_checkpoint(tmp_path, 3) / "state" / ".nfs0001"
    stray.touch()
    pruned = make_checkpoint(tmp_path, 9)
    metadata = make_checkpoint(tmp_path, 6) / "state" / ".metadata"
    (tmp_path / "checkpoints" / "step-00000012.tmp").mkdir()
    listed = checkpoint_table.list_checkpoints(tmp_path)
    shutil.rmtree(pruned)  # the run goes on, which is no damage
    monkeypatch.setattr(checkpoint_table, "list_checkpoints", lambda run: listed)
    changed = "NOT VALID: state/.metadata does not have the sha256 of the manifest: its content changed"
    for flips, flags, status, ends in ((0, ["--verify"], 0, "  valid"), (1, [], 0, "  valid"), (0, ["--verify"], 1, changed)):
        content = metadata.read_bytes()
        metadata.write_bytes(bytes([content[0] ^ flips]) + content[1:])
        assert call_toolkit("checkpoints", tmp_path, *flags) == status
        rows = capsys.readouterr().out.splitlines()
        assert rows[1].endswith("valid: also holds 'state/.nfs0001', which nothing reads")
        assert rows[2].endswith(ends) and not any("step-00000009" in row for row in rows)


def test_who_waits_at_a_terminal_sees_how_far_the_hashing_is(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, 3)
    for flags, is_terminal, said in ((["--verify"], True, "hashing:   0%"), ([], True, ""), (["--verify"], False, "")):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert call_toolkit("checkpoints", tmp_path, *flags) == 0
        assert said in stream.getvalue() and bool(stream.getvalue()) == bool(said)
        assert not said or stream.getvalue().endswith("\r"), "the bar is gone"


def test_figures_that_are_no_equals_are_noted(tmp_path, capsys):
    make_checkpoint(tmp_path, 3, 0.5, {"rows": "b", "num_beams": 1})
    make_checkpoint(tmp_path, 6, 0.6, {"rows": "a", "num_beams": 4})
    make_checkpoint(tmp_path, 9, 0.7)
    make_checkpoint(tmp_path, 12, 0.8)
    make_checkpoint(tmp_path, 15)
    assert call_toolkit("checkpoints", tmp_path) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert rows[0].endswith("valid: metrics are of other rows than step-00000012's")
    assert rows[1].endswith("valid: texts were generated or scored in another way than step-00000012's")
    assert all(row.endswith("  valid") for row in rows[2:])
