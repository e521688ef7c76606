"""Which checkpoints exist, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.manifest import (
    MANIFEST,
    best_checkpoint,
    check_files,
    commit,
    describe_files,
    list_checkpoints,
    newest_valid,
    prune,
    read_manifest,
    step_folder,
)


def make_checkpoint(run: Path, step: int, loss: float | None = None) -> Path:
    folder = step_folder(run, step)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    (unfinished / "state").mkdir(parents=True)
    (unfinished / "state" / "shard").write_bytes(bytes([step] * 100))
    (unfinished / "rng").write_bytes(b"state of chance")
    manifest = {"step": step, "metrics": {} if loss is None else {"loss": loss}}
    commit(unfinished, folder, {**manifest, "files": describe_files(unfinished, ["state/shard", "rng"])})
    return folder


def test_a_committed_checkpoint_is_the_newest_valid_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3)
    newest = make_checkpoint(tmp_path, 12)
    assert newest_valid(tmp_path) == (newest, [])
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 12]
    assert not list(newest.parent.glob("*.tmp"))


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / MANIFEST).unlink(), "step-00000012 has no manifest.json: it was never finished"),
        (lambda f: (f / MANIFEST).write_text("{"), "step-00000012/manifest.json cannot be read"),
        (lambda f: (f / "rng").unlink(), "step-00000012 lacks rng"),
        (lambda f: (f / "state" / "shard").write_bytes(b"\x0c" * 99), "state/shard has 99 bytes instead of 100"),
        (lambda f: (f / "state" / "shard").write_bytes(b"\x0c" * 99 + b"\x0d"), "state/shard does not have the sha256"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, damage, sentence: str) -> None:
    older = make_checkpoint(tmp_path, 3)
    damage(make_checkpoint(tmp_path, 12))
    found, refused = newest_valid(tmp_path)
    assert found == older
    assert len(refused) == 1
    assert sentence in refused[0]


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format_version": 0}))
    assert newest_valid(tmp_path) == (None, ["step-00000003 has checkpoint format 0; this version reads 1"])


def test_a_manifest_cannot_name_files_outside(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    manifest = read_manifest(folder)
    manifest["files"]["../../secret"] = describe_files(tmp_path, ["secret"])["secret"]
    with pytest.raises(ValueError, match="outside the checkpoint"):
        check_files(folder, manifest)


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, None), (5, 0.8), (6, 0.7)):
        make_checkpoint(tmp_path, step, loss)
    unfinished = step_folder(tmp_path, 7)
    unfinished.mkdir()
    prune(tmp_path, keep_last=2, keep_best=2, metric="loss", higher_is_better=False)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 3, 5, 6, 7]
    assert best_checkpoint(tmp_path, "loss", higher_is_better=False) == step_folder(tmp_path, 2)
    assert best_checkpoint(tmp_path, "loss", higher_is_better=True) == step_folder(tmp_path, 5)
    assert best_checkpoint(tmp_path, "rougeL", higher_is_better=True) is None


def test_committing_again_replaces_the_checkpoint_of_that_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, loss=1.0)
    make_checkpoint(tmp_path, 3, loss=2.0)
    assert read_manifest(step_folder(tmp_path, 3))["metrics"] == {"loss": 2.0}
    assert newest_valid(tmp_path)[0] == step_folder(tmp_path, 3)
