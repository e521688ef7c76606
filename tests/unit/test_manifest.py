"""Which checkpoints exist, whole."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.manifest import (
    MANIFEST,
    best_checkpoint,
    check_files,
    commit,
    describe_files,
    find_checkpoint,
    hash_model_config,
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
    assert newest_valid(tmp_path) == (None, ["step-00000003 has checkpoint format 0; this version reads 2"])


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


def test_pruning_keeps_what_was_just_written_beside_later_damaged_ones(tmp_path: Path) -> None:
    damaged, old, just_written = (make_checkpoint(tmp_path, step) for step in (12, 3, 4))
    os.utime(damaged / MANIFEST, ns=(1, 1))
    os.utime(old / MANIFEST, ns=(2, 2))
    prune(tmp_path, keep_last=1, keep_best=0, metric="loss", higher_is_better=False)
    assert [folder for _, folder in list_checkpoints(tmp_path)] == [just_written, damaged]


def test_a_named_checkpoint_is_refused_while_there_are_later_ones(tmp_path: Path) -> None:
    early, late = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 12)
    assert find_checkpoint(tmp_path, str(late)) == (late, [])
    sentence = f"checkpoint.resume is {early}, but {early.parent} has later ones: remove or move step-00000012 first"
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        find_checkpoint(tmp_path, str(early))
    late.rename(tmp_path / "moved")
    assert find_checkpoint(tmp_path, str(early)) == (early, [])


def test_auto_starts_anew_only_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") == (None, [])
    only = make_checkpoint(tmp_path, 3)
    assert find_checkpoint(tmp_path, "auto") == (only, [])
    (only / "rng").unlink()
    with pytest.raises(UserError, match=r"is valid \(step-00000003 lacks rng\): remove them to start from the first step"):
        find_checkpoint(tmp_path, "auto")


def test_a_model_config_is_told_by_what_it_says() -> None:
    config = {"d_model": 16, "id2label": {0: "a"}, "transformers_version": "5.0.0"}
    assert hash_model_config(config) == hash_model_config({**config, "transformers_version": "5.1.0"})
    assert hash_model_config(config) != hash_model_config({**config, "d_model": 32})
    assert hash_model_config(config) != hash_model_config({**config, "scale": 2.0})
