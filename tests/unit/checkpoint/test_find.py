"""Which checkpoints exist, whole."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_files import (
    LOSS,
    change_manifest,
    found_folder,
    make_checkpoint,
    names,
    newest_folder,
    prune_to,
    ranked,
)
from tests.support.refusals import refusal
from toolkit.checkpoint.manifest import MANIFEST, check_files, list_checkpoints, read_manifest, step_folder
from toolkit.files.durable import describe_files


def with_version(version):
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
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, damage, sentence):
    older, newest = (make_checkpoint(tmp_path, step) for step in (3, 12))
    assert newest_folder(tmp_path) == (newest, []) and not list(newest.parent.glob("*.tmp"))
    damage(newest)
    found, [refused] = newest_folder(tmp_path)
    assert found == older and sentence in refused


@pytest.mark.parametrize("name", ["../../secret", "state/../../../secret", "{outside}/secret", "", ".", "a\0b", "a\nb"])
def test_a_manifest_cannot_name_files_outside(tmp_path, name):
    folder = make_checkpoint(tmp_path, 3)
    (tmp_path / "secret").write_bytes(b"x")
    about = describe_files(tmp_path, ["secret"])["secret"]
    change_manifest(folder, lambda manifest: manifest["files"].update({name.format(outside=tmp_path): about}))
    with pytest.raises(ValueError, match="outside the checkpoint"):
        check_files(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["rng-00000.safetensors", "state", "state/.metadata"])
def test_links_do_not_lead_out_of_a_checkpoint(tmp_path, name):
    folder = make_checkpoint(tmp_path, 3)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"which is outside the checkpoint: {name} is a link"):
        check_files(folder, read_manifest(folder))


def test_a_file_that_the_disk_does_not_give_back_is_reported(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, 3)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("toolkit.checkpoint.manifest.hash_file", fail)
    assert newest_folder(tmp_path) == (None, ["step-00000003/state/.metadata cannot be read (Input/output error)"])


def test_a_named_checkpoint_is_refused_while_there_are_later_ones(tmp_path):
    early, late = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 4)
    assert found_folder(tmp_path, str(late)) == (late, [])
    sentence = f"checkpoint.resume is {early}, but there are later ones beside it: move step-00000004 away first"
    assert refusal(found_folder, tmp_path, str(early)) == sentence
    late.rename(tmp_path / "moved")
    assert found_folder(tmp_path, str(early)) == (early, [])


def test_auto_starts_anew_only_where_there_is_no_checkpoint(tmp_path):
    assert found_folder(tmp_path, "auto") == newest_folder(tmp_path) == (None, [])
    only = make_checkpoint(tmp_path, 3)
    assert found_folder(tmp_path, "auto") == (only, [])
    (only / "rng-00000.safetensors").unlink()
    why = "is valid (step-00000003 lacks rng-00000.safetensors): move them away, or take another run.name"
    assert why in refusal(found_folder, tmp_path, "auto")


@pytest.mark.parametrize("name", ["state/.metadata", "rng-00000.safetensors", "state/__0_0.distcp"])
def test_what_would_be_read_unchecked_is_named(tmp_path, name):
    folder = make_checkpoint(tmp_path, 3)
    (folder / "state" / "__0_0.distcp").write_bytes(b"a shard")
    change_manifest(folder, lambda m: m["files"].update(describe_files(folder, ["state/__0_0.distcp"])))
    change_manifest(folder, lambda m: m["files"].pop(name))
    with pytest.raises(ValueError, match=f"step-00000003/manifest.json does not name {name}"):
        check_files(folder, read_manifest(folder))


NAN = float("nan")


@pytest.mark.parametrize(("higher_is_better", "better", "worse"), [(False, 0.9, 1.1), (True, 1.1, 0.9)])
def test_a_nan_is_never_the_best(higher_is_better, better, worse):
    metric = replace(LOSS, higher_is_better=higher_is_better)
    assert metric.is_better(worse, None) and metric.is_better(better, 1.0)
    assert not any(metric.is_better(new, old) for new, old in ((1.0, 1.0), (worse, 1.0), (NAN, 1.0), (NAN, None)))


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, NAN), (5, 0.8), (6, 0.7)):
        last = make_checkpoint(tmp_path, step, loss)
    assert prune_to(tmp_path, last, keep_last=2, keep_best=2) == ([step_folder(tmp_path, 1), step_folder(tmp_path, 4)], [])
    assert names(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 5, 6)]
    assert [found.checkpoint.step for found in ranked(tmp_path, LOSS)] == [2, 3, 6, 5]
    assert [found.checkpoint.step for found in ranked(tmp_path, LOSS, last_step=5)] == [2, 3, 5]
    assert [found.checkpoint.step for found in ranked(tmp_path, replace(LOSS, higher_is_better=True))] == [5, 6, 3, 2]
    assert ranked(tmp_path, replace(LOSS, name="rougeL")) == []
    # The newest is kept whatever it was measured on, and what was just written beside later ones that are damaged.
    newest = make_checkpoint(tmp_path, 7, 0.4, OTHER)
    assert prune_to(tmp_path, newest, keep_last=1, keep_best=1)[1] == [] and names(tmp_path) == ["step-00000002", "step-00000007"]
    just_written = make_checkpoint(tmp_path, 4, 0.1)
    (newest / MANIFEST).unlink()
    prune_to(tmp_path, just_written)
    assert [folder for _, folder in list_checkpoints(tmp_path)] == [just_written, newest]


def test_what_is_not_whole_is_neither_counted_nor_removed_nor_best(tmp_path):
    whole, truncated, bare = (make_checkpoint(tmp_path, step, loss=1 / step) for step in (1, 2, 3))
    (truncated / "rng-00000.safetensors").write_bytes(b"")
    (bare / MANIFEST).unlink()
    last = make_checkpoint(tmp_path, 4, loss=2.0)
    assert prune_to(tmp_path, last, keep_last=2) == ([], [])
    assert ranked(tmp_path, LOSS)[0].checkpoint.folder == whole
    # Nothing is removed where the one just written is not whole.
    broken = make_checkpoint(tmp_path, 5)
    (broken / "rng-00000.safetensors").unlink()
    sentence = "no checkpoint was removed, as the one just written is not whole: step-00000005 lacks rng-00000.safetensors"
    assert prune_to(tmp_path, broken) == ([], [sentence])


OTHER, THIRD = {"rows": "b", "num_beams": 1}, {"rows": "c", "num_beams": 1}


def test_figures_of_other_rows_are_not_compared_with_those_of_these(tmp_path):
    """Step 1 has the lowest loss, of rows that were easier; steps 2 and 3 were measured on the same."""
    for step, loss, rows in ((1, 0.1, THIRD), (2, 0.3, OTHER), (3, 0.2, OTHER), (4, 0.6, None), (5, 0.7, None)):
        last = make_checkpoint(tmp_path, step, loss, rows)
    order = [(found.checkpoint.step, found.is_comparable) for found in ranked(tmp_path, LOSS)]
    assert order == [(4, True), (5, True), (3, False), (2, False), (1, False)]
    removed, _ = prune_to(tmp_path, last, keep_last=1, keep_best=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert removed == [step_folder(tmp_path, step) for step in (1, 2, 3)]


@pytest.mark.parametrize(("compared", "order"), [(("rows",), [1, 2]), (("rows", "num_beams"), [2, 1])])
def test_how_texts_are_generated_matters_to_figures_of_texts_alone(tmp_path, compared, order):
    make_checkpoint(tmp_path, 1, 0.3, {"rows": "a", "num_beams": 4})
    make_checkpoint(tmp_path, 2, 0.5, {"rows": "a", "num_beams": 1})
    assert [found.checkpoint.step for found in ranked(tmp_path, replace(LOSS, compared=compared))] == order
