"""Files: JSON lines hold any text and stay whole for other readers; a file system that cannot sync a folder is one warning;
the lock of run folders, caches and outputs: one process at a time, with locks of the file system and without."""

import errno
import itertools
import logging
import multiprocessing
import os
import shutil
import stat
import sys
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import DEFAULT, Mock

import pytest
from filelock import SoftFileLock

from tests.support.locks import lock_held, refuse_locks, without_locks
from tests.support.refusals import refusal
from toolkit.errors import UserError
from toolkit.files import durable
from toolkit.files.durable import fsync_path, fsync_tree, written_beside
from toolkit.files.json_lines import encode_json_line, load_json_lines, read_json_lines, save_json_lines
from toolkit.files.lock import holds_lock, release_lock, take_lock


def test_every_character_comes_back_and_no_reader_splits_a_line(tmp_path):
    text = "".join(map(chr, reversed(range(sys.maxunicode + 1))))  # half surrogates too, of which no two make a pair
    path = tmp_path / "rows.jsonl"
    save_json_lines(path, [{text: text}, text])
    assert load_json_lines(path) == [{text: text}, text]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_text_in_any_script_stays_readable():
    assert encode_json_line({"text": "Zürich 北京\u2028"}) == '{"text": "Zürich 北京\\u2028"}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json_line(float("nan"))


def test_foreign_files(tmp_path):
    """A byte order mark, three kinds of line ends, blank lines, raw line separators in strings."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\n{"a": "x\u2028\x85y"}\r  \r[2]\n3'.encode())
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (3, {"a": "x\u2028\x85y"}), (5, [2]), (6, 3)]


@pytest.mark.parametrize("torn", [b'{"a": 1', b'"\xe2\x80', b"3", b'{"a": \n'])
def test_a_torn_end_is_left_out_on_demand(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n' + torn)
    assert load_json_lines(path, skip_torn_end=True) == [{"a": 0}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "Expecting value: column 7"),
        (b'"\xff"', "'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "maximum rec"),
    ],
)
@pytest.mark.parametrize("skip_torn_end", [False, True])
def test_a_broken_line_is_named(tmp_path, line, reason, skip_torn_end):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n\n" + line + b"\n2\n")
    sentence = refusal(load_json_lines, path, skip_torn_end=skip_torn_end)
    assert sentence.startswith(f"{path}, line 3: not JSON ({reason}")
    assert sentence.endswith("): correct or remove the line")


def refuse_folders(monkeypatch: pytest.MonkeyPatch, number: int, kind: int = stat.S_IFDIR) -> None:
    """`fsync` of one kind of path fails, as on FUSE and SMB."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(durable, "_unsynced", set(), raising=False)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_that_cannot_be_synced_is_one_warning(number, tmp_path, monkeypatch, caplog):
    refuse_folders(monkeypatch, number)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "toolkit"):
        fsync_tree(tmp_path)
        fsync_tree(tmp_path)
    [record] = caplog.records
    assert record.getMessage().endswith(
        f" cannot sync a folder ({os.strerror(number)}): a power cut may undo the newest renames, and a resume then takes an "
        "older checkpoint"
    )


def test_a_folder_whose_sync_fails_otherwise_and_a_file_are_errors(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with monkeypatch.context() as one:
        refuse_folders(one, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            fsync_path(tmp_path)
    refuse_folders(monkeypatch, errno.EINVAL, stat.S_IFREG)
    with pytest.raises(OSError, match="Invalid argument"):
        fsync_path(tmp_path / "file")


def test_half_a_file_goes_and_what_stood_stands(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("before")
    with pytest.raises(OSError), written_beside(path) as beside:
        beside.write_text("ha")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["config.yaml"]
    with written_beside(path) as beside:
        beside.write_text("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["config.yaml"]


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
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as workers:
        assert workers.submit(holds_lock, path).result() is False
        release_lock(path)
        with lock_held(path, has_locks=has_locks):
            pass


def test_a_removed_file_is_noticed_and_locked_again(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "lock"
    take_lock(path, "in use")
    shutil.rmtree(path.parent)
    assert not holds_lock(path)
    path.parent.mkdir()
    path.touch()
    assert not holds_lock(path), "that of another run"
    # As a network file system answers once where another node has removed the file.
    answers = itertools.chain([OSError(errno.ESTALE, "Stale file handle")], itertools.repeat(DEFAULT))
    monkeypatch.setattr(os, "fstat", fstat := Mock(wraps=os.fstat, side_effect=answers))
    assert take_lock(path, "in use") and holds_lock(path) and fstat.call_count > 1
    release_lock(path)
