"""File systems that cannot sync a folder: one warning, and the save goes on. The rest is in the tests of caches and saves."""

import errno
import logging
import os
import stat

import pytest

from toolkit.files import durable
from toolkit.files.durable import fsync_path, fsync_tree, written_beside


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
