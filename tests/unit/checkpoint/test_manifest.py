"""Checkpoints that take the place of others and go, with kills at each rename and in each removal."""

import errno
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.support.checkpoint_files import (
    found_folder,
    make_checkpoint,
    manifest_of,
    names,
    newest_folder,
    prune_to,
    write_unfinished,
)
from tests.support.refusals import refusal
from toolkit.checkpoint.manifest import commit, list_checkpoints, list_leftovers, read_manifest, step_folder


def test_what_stood_there_is_put_back_where_its_replacement_never_came(tmp_path):
    before, replaced = (make_checkpoint(tmp_path, step) for step in (3, 12))
    replaced.rename(replaced.with_name("step-00000012.old"))
    assert newest_folder(tmp_path) == (before, [])
    sentence = "step-00000012.old is step-00000012 again: the save that should have replaced it never finished"
    assert found_folder(tmp_path, "auto") == (replaced, [sentence])
    assert found_folder(tmp_path, "auto") == (replaced, [])


def test_what_stood_there_goes_only_when_its_replacement_is_valid(tmp_path):
    folder = make_checkpoint(tmp_path, 3)
    replaced = Path(shutil.copytree(folder, folder.with_name("step-00000003.old")))
    (folder / "rng-00000.safetensors").write_bytes(b"state of chancE")
    assert "is valid" in refusal(found_folder, tmp_path, "auto")
    assert replaced.exists()
    assert prune_to(tmp_path, make_checkpoint(tmp_path, 4), keep_last=2) == ([], [])
    assert replaced.exists()  # beside a replacement that is kept
    shutil.copytree(replaced, replaced.with_suffix(".removing"))
    shutil.copytree(replaced, replaced.with_suffix(".tmp"))
    assert prune_to(tmp_path, make_checkpoint(tmp_path, 5)) == ([folder, step_folder(tmp_path, 4)], [])
    assert names(tmp_path) == ["step-00000005"]  # with its replacement, and not put back
    last = make_checkpoint(tmp_path, 6)
    shutil.copytree(last, last.with_name("step-00000006.old"))
    assert found_folder(tmp_path, "auto") == (last, [])
    assert list_leftovers(tmp_path) == []


def test_a_linked_checkpoint_is_unlinked_and_what_it_points_to_is_not_removed(tmp_path):
    moved, last = (make_checkpoint(tmp_path, step) for step in (1, 2))
    moved.rename(tmp_path / "other_disk")
    moved.symlink_to(tmp_path / "other_disk")
    assert prune_to(tmp_path, last) == ([moved], [])
    assert names(tmp_path) == ["step-00000002"]
    assert (tmp_path / "other_disk" / "rng-00000.safetensors").is_file()


def refuse_removals(patch: pytest.MonkeyPatch, step: int) -> None:
    real = shutil.rmtree

    def rmtree(path: Path, *args, **kwargs) -> None:
        if path.name == f"step-{step:08d}.removing":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *args, **kwargs)

    patch.setattr(shutil, "rmtree", rmtree)


def test_pruning_goes_on_where_one_cannot_be_removed_and_tries_it_again(tmp_path, monkeypatch):
    first, second, last = (make_checkpoint(tmp_path, step) for step in (1, 2, 3))
    (step_folder(tmp_path, 9).with_name("step-00000009.tmp")).mkdir()
    refuse_removals(monkeypatch, 1)
    sentence = f"{first} could not be removed (Permission denied): the next save tries again"
    assert prune_to(tmp_path, last) == ([second], [sentence])
    assert names(tmp_path) == ["step-00000001.removing", "step-00000003"]
    monkeypatch.undo()
    assert prune_to(tmp_path, last) == ([], [])
    assert names(tmp_path) == ["step-00000003"]


def test_what_cannot_be_removed_yet_does_not_fail_the_save_and_goes_later(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, 3, loss=1.0)
    refuse_removals(monkeypatch, 3)
    make_checkpoint(tmp_path, 3, loss=2.0)
    assert names(tmp_path) == ["step-00000003", "step-00000003.removing"]
    monkeypatch.undo()
    last = make_checkpoint(tmp_path, 3, loss=3.0)  # its `.old` needs that name
    assert names(tmp_path) == ["step-00000003"]
    assert read_manifest(last)["metrics"] == {"loss": 3.0}
    shutil.copytree(last, last.with_name("step-00000003.old"))
    assert prune_to(tmp_path, last) == ([], [])
    assert names(tmp_path) == ["step-00000003"]


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> list[str]:
    """Die at the call-th moment: before each rename and removal, in the midst of each removal; returns the moments passed."""
    moments: list[str] = []
    rename, rmtree = os.rename, shutil.rmtree

    def moment(what: str) -> None:
        moments.append(what)
        if len(moments) == call:
            raise Killed

    def killed_rename(source: Path, target: Path) -> None:
        moment(f"before {Path(source).name} becomes {Path(target).name}")
        rename(source, target)

    def killed_rmtree(path: Path, *args, **kwargs) -> None:
        moment(f"before the removal of {Path(path).name}")
        (path / "state" / ".metadata").unlink(missing_ok=True)  # the manifest is still there
        moment(f"in the removal of {Path(path).name}")
        rmtree(path, *args, **kwargs)
        moment(f"after the removal of {Path(path).name}")

    monkeypatch.setattr(os, "rename", killed_rename)
    monkeypatch.setattr(shutil, "rmtree", killed_rmtree)
    return moments


BEFORE_THE_SAVE = {
    "a new step": (4, lambda folder: None),
    "a step once more": (3, lambda folder: None),
    "a broken step once more": (3, lambda folder: (folder / "rng-00000.safetensors").unlink()),
    "a step with an .old that stayed": (3, lambda folder: shutil.copytree(folder, folder.with_name(f"{folder.name}.old"))),
}


def save_and_die(run: Path, what: str, call: int) -> list[str]:
    """Steps 1, 2, 3 stand, another is committed and pruned to, as a run does it, and dies at a moment; those that it passed."""
    step, prepare = BEFORE_THE_SAVE[what]
    for earlier in (1, 2, 3):
        last = make_checkpoint(run, earlier)
    prepare(last)
    folder = step_folder(run, step)
    unfinished = write_unfinished(folder)
    with pytest.MonkeyPatch.context() as patched:
        moments = kill_at(patched, call)
        with suppress(Killed):
            commit(unfinished, folder, manifest_of(step, None, unfinished))
            prune_to(run, folder)
    return moments


@pytest.mark.parametrize("what", BEFORE_THE_SAVE)
def test_killed_at_any_moment_of_a_save_a_valid_one_is_left_and_the_next_save_tidies_up(tmp_path, what):
    for call in count(1):
        run = tmp_path / str(call)
        moments = save_and_die(run, what, call)
        if len(moments) < call:
            break
        found, _ = found_folder(run, "auto")
        assert found is not None, moments
        assert found >= step_folder(run, 2 if what == "a broken step once more" else 3), moments
        for _, folder in list_checkpoints(run):
            assert (folder / "state" / ".metadata").exists(), f"half removed under a name that counts: {moments}"
        left = ["step-00000003"] if newest_folder(run)[1] else []  # broken from the start, and for the user to look at
        assert prune_to(run, make_checkpoint(run, 5))[1] == [], moments
        assert names(run) == [*left, "step-00000005"], moments
    assert call > 10, moments
    assert names(run) == [step_folder(run, BEFORE_THE_SAVE[what][0]).name]


@pytest.mark.parametrize("suffix", ["", ".old", ".removing", ".tmp"])
def test_a_plain_file_named_like_a_checkpoint_goes(suffix, tmp_path):
    """Such a file was named at every save, and never removed."""
    make_checkpoint(tmp_path, 3)
    folder = make_checkpoint(tmp_path, 5)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / f"step-00000004{suffix}").write_text("not a folder")
    if not suffix:  # it is in the way of the next save of that step only
        make_checkpoint(tmp_path, 4)
    assert prune_to(tmp_path, folder, keep_last=3)[1] == []
    assert names(tmp_path) == ["step-00000003", *([] if suffix else ["step-00000004"]), "step-00000005"]
