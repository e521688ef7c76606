"""Which checkpoints exist, whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import change_manifest, found_folder, make_checkpoint, newest_folder
from tests.support.refusals import refusal
from toolkit.checkpoint.manifest import MANIFEST, check_files, read_manifest
from toolkit.files.durable import describe_files


def with_version(version: Any) -> Any:
    return lambda folder: change_manifest(folder, lambda manifest: manifest.update(format_version=version))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / MANIFEST).unlink(), "step-00000012 has no manifest.json: it was never finished"),
        (lambda f: (f / "rng-00000.safetensors").unlink(), "step-00000012 lacks rng-00000.safetensors"),
        (
            lambda f: ((f / "rng-00000.safetensors").unlink(), (f / "rng-00000.safetensors").mkdir()),
            "step-00000012/rng-00000.safetensors is not a file",
        ),
        (lambda f: (f / "state" / ".metadata").write_bytes(b"\x0c" * 99), "state/.metadata has 99 bytes instead of 130"),
        (lambda f: (f / "state" / ".metadata").write_bytes(b"\x0c" * 130), "state/.metadata does not have the sha256"),
        (lambda f: f.rename(f.with_name("step-00000013")), "is of step 12, which is not what the folder is named after"),
        *(
            (lambda f, text=text: (f / MANIFEST).write_text(text), "step-00000012/manifest.json ")
            for text in ("[]", "null", "7", "[" * 100_000, "\ufeff{}", '{"format_version": 3', "{", "")
        ),
        (
            with_version(3),
            "step-00000012 has checkpoint format 3; this version reads 4: export it with the version that wrote it, and give",
        ),
        (with_version(5), "step-00000012 has checkpoint format 5; this version reads 4: update the toolkit"),
        *((with_version(name), f"names no checkpoint format (format_version is {name!r})") for name in ("3", None, True)),
    ],
)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, damage: Any, sentence: str) -> None:
    older, newest = (make_checkpoint(tmp_path, step) for step in (3, 12))
    assert newest_folder(tmp_path) == (newest, []) and not list(newest.parent.glob("*.tmp"))
    damage(newest)
    found, [refused] = newest_folder(tmp_path)
    assert found == older and sentence in refused


def test_sizes_alone_do_not_tell_a_changed_byte(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "rng-00000.safetensors").write_bytes(b"state of chancE")
    check_files(folder, read_manifest(folder), hashes=False)
    (folder / "rng-00000.safetensors").write_bytes(b"state")
    with pytest.raises(ValueError, match="rng-00000.safetensors has 5 bytes instead of 15"):
        check_files(folder, read_manifest(folder), hashes=False)


@pytest.mark.parametrize("name", ["../../secret", "state/../../../secret", "{outside}/secret", "", ".", "a\0b", "a\nb"])
def test_a_manifest_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (tmp_path / "secret").write_bytes(b"x")
    about = describe_files(tmp_path, ["secret"])["secret"]
    change_manifest(folder, lambda manifest: manifest["files"].update({name.format(outside=tmp_path): about}))
    with pytest.raises(ValueError, match="outside the checkpoint"):
        check_files(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["rng-00000.safetensors", "state", "state/.metadata"])
def test_links_do_not_lead_out_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"which is outside the checkpoint: {name} is a link"):
        check_files(folder, read_manifest(folder))


def test_a_file_that_the_disk_does_not_give_back_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, 3)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("toolkit.checkpoint.manifest.hash_file", fail)
    assert newest_folder(tmp_path) == (None, ["step-00000003/state/.metadata cannot be read (Input/output error)"])


def test_a_named_checkpoint_is_refused_while_there_are_later_ones(tmp_path: Path) -> None:
    early, late = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 4)
    assert found_folder(tmp_path, str(late)) == (late, [])
    sentence = f"checkpoint.resume is {early}, but {early.parent} has later ones: move step-00000004 away first"
    assert refusal(found_folder, tmp_path, str(early)) == sentence
    late.rename(tmp_path / "moved")
    assert found_folder(tmp_path, str(early)) == (early, [])


def test_auto_starts_anew_only_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert found_folder(tmp_path, "auto") == newest_folder(tmp_path) == (None, [])
    only = make_checkpoint(tmp_path, 3)
    assert found_folder(tmp_path, "auto") == (only, [])
    (only / "rng-00000.safetensors").unlink()
    why = "is valid (step-00000003 lacks rng-00000.safetensors): move them away to start from the first step"
    assert why in refusal(found_folder, tmp_path, "auto")


@pytest.mark.parametrize("name", ["state/.metadata", "rng-00000.safetensors", "state/__0_0.distcp"])
def test_what_would_be_read_unchecked_is_named(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "state" / "__0_0.distcp").write_bytes(b"a shard")
    change_manifest(folder, lambda m: m["files"].update(describe_files(folder, ["state/__0_0.distcp"])))
    change_manifest(folder, lambda m: m["files"].pop(name))
    with pytest.raises(ValueError, match=f"step-00000003/manifest.json does not name {name}"):
        check_files(folder, read_manifest(folder))
