"""The lock of run folders, caches and outputs: one process at a time, with locks of the file system and without."""

import multiprocessing
import os
import shutil

import pytest
from filelock import SoftFileLock

from tests.support.locks import lock_held, refuse_locks, without_locks
from toolkit.errors import UserError
from toolkit.files.lock import holds_lock, release_lock, take_lock


def test_one_process_holds_it_and_a_kill_releases_it(tmp_path):
    path = tmp_path / "lock"
    with lock_held(path), pytest.raises(UserError, match="^in use$"):
        take_lock(path, "in use")
    assert take_lock(path, "in use") and take_lock(path, "in use"), "held by this process already"
    release_lock(path)
    with lock_held(path):
        assert not holds_lock(path)
    assert os.listdir(tmp_path) == ["lock"] and not path.stat().st_size


def test_without_locks_too(tmp_path, monkeypatch):
    """Both processes used to go on."""
    path, holder = tmp_path / "lock", tmp_path / "lock.holder"
    path.touch()  # as a lock of the file system leaves it: the same folder may be mounted in two ways
    without_locks(monkeypatch)
    with lock_held(path, has_locks=False):
        with pytest.raises(UserError) as caught:
            take_lock(path, "in use")
    assert str(caught.value) == f"in use; or, if it was killed, remove {holder}: this file system has no locks"
    assert holder.exists(), "the process was killed"
    assert take_lock(path, "in use") and holds_lock(path)
    holder.unlink()
    assert not holds_lock(path) and take_lock(path, "in use")
    release_lock(path)
    assert os.listdir(tmp_path) == ["lock"]


def test_where_no_lock_works_a_warning_says_so(tmp_path, monkeypatch, capsys):
    without_locks(monkeypatch)
    monkeypatch.setattr(SoftFileLock, "_acquire", refuse_locks)
    path = tmp_path / "lock"
    assert not take_lock(path, "in use") and not holds_lock(path)
    said = f"WARNING: {path} cannot be locked, so make sure that no other process writes there: this file system has no locks\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("has_locks", [True, False])
def test_children_do_not_inherit_it(tmp_path, monkeypatch, has_locks):
    """A worker that outlives a killed run must not keep the next one out."""
    path = tmp_path / "lock"
    if not has_locks:
        without_locks(monkeypatch)
    take_lock(path, "in use")
    fork = multiprocessing.get_context("fork")
    asks, answers = fork.Pipe()

    def child() -> None:
        answers.send(holds_lock(path))
        answers.recv()

    process = fork.Process(target=child)
    process.start()
    try:
        assert asks.recv() is False
        release_lock(path)
        with lock_held(path, has_locks=has_locks):
            asks.send("end")
            process.join()
    finally:
        process.kill()


def test_a_removed_file_is_noticed_and_locked_again(tmp_path):
    path = tmp_path / "folder" / "lock"
    take_lock(path, "in use")
    shutil.rmtree(path.parent)
    assert not holds_lock(path)
    path.parent.mkdir()
    path.touch()
    assert not holds_lock(path), "that of another run"
    assert take_lock(path, "in use") and holds_lock(path)
    release_lock(path)
