"""Folders of the cache: durable before they count, checked before they are read, shared by processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from toolkit.data import cache_folders
from toolkit.data.cache_folders import IDLE_S, find_or_build

PATIENCE_S = 600
ANOTHER = """
import logging, sys
from pathlib import Path
from toolkit.data.cache_folders import find_or_build

cache, name, pause = Path(sys.argv[1]), *sys.argv[2:]

def wait():
    print("waits", flush=True)
    sys.stdin.readline()

def wait_at_damage(record):
    if pause == "at damage" and "is built again" in record.getMessage():
        wait()
    return True

def build(folder):
    (folder / "rows.arrow").write_text(name)
    if pause == "in build":
        wait()
    return {"by": name}

logging.getLogger("toolkit").addFilter(wait_at_damage)
print("has that of", find_or_build("the cache", cache / "a", build)["by"], flush=True)
"""


@contextmanager
def another_process(cache: Path, name: str, pause: str) -> Iterator[subprocess.Popen[str]]:
    """A real one that builds `cache / "a"` and has come to the place where it waits for a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ANOTHER, str(cache), name, pause], **pipes) as process:
        try:
            while process.stdout.readline() != "waits\n":
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def fill(text: str) -> Callable[[Path], dict]:
    def build(folder: Path) -> dict:
        (folder / "inner").mkdir()
        (folder / "rows.arrow").write_text(text)
        (folder / "inner" / "state.json").write_text("{}")
        return {"by": text}

    return build


def test_everything_is_on_the_disk_before_the_name_counts(tmp_path, monkeypatch):
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}").partition("/content")[2] or "parent"))

    def note_rename(path: Path, target: Path) -> Path:
        if path.name == "content":
            events.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    find_or_build("the cache", tmp_path / "cache" / "a", fill("text"))
    place = events.index(("rename", "a"))
    names = ("/inner/state.json", "/rows.arrow", "/about.json.tmp", "/inner", "parent")
    assert {("fsync", name) for name in names} <= {*events[:place]} and events[place + 1 :] == [("fsync", "parent")]


@pytest.mark.parametrize(
    ("damaged", "content"),
    [
        *(("rows.arrow", content) for content in (b"some", b"", b"same text", None)),
        ("tokenizer/chat_template.jinja", b"{{ messages }}"),  # one more file, which a tokenizer would load
        *(("about.json", content) for content in (None, b"", b"{}", b"[1]", b'{"files": 3, "sha256": "x"}', b"\xff")),
        ("about.json", "changed"),
        ("*", None),
    ],
)
def test_a_damaged_folder_is_named_and_built_again(tmp_path, damaged, content, capsys):
    folder, about_file = tmp_path / "a", tmp_path / "a" / "about.json"
    about = find_or_build("the cache", folder, fill("some text"))
    assert find_or_build("the cache", folder, fill("other text")) == about
    if content is None:
        for path in sorted(folder.rglob(damaged), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    else:
        changed = about_file.read_bytes().replace(b'"by": "some', b'"by": "same')
        (folder / damaged).parent.mkdir(exist_ok=True)
        (folder / damaged).write_bytes(changed if content == "changed" else content)
    assert not capsys.readouterr().out
    assert find_or_build("the cache", folder, fill("some text")) == about
    assert capsys.readouterr().err == f"WARNING: the cache {folder} is damaged: it is built again\n"
    assert os.listdir(tmp_path) == ["a"] and (folder / "rows.arrow").read_text() == "some text"


@pytest.mark.parametrize("pause", ["at damage", "in build"])
def test_of_two_processes_that_build_one_folder_the_slower_takes_what_is_there(tmp_path, pause):
    """It found the damage before the faster one had built the folder again, or is overtaken in its build."""
    folder = tmp_path / "a"
    if pause == "at damage":
        find_or_build("the cache", folder, fill("first"))
        (folder / "rows.arrow").write_text("worst")
    with another_process(tmp_path, "slower", pause) as slower:
        assert find_or_build("the cache", folder, fill("faster"))["by"] == "faster"
        built = folder.stat().st_ino
        assert len(list(tmp_path.glob("unfinished-*"))) == 1, "that of a run that is alive"
        out, _ = slower.communicate("\n", timeout=PATIENCE_S)
        assert slower.returncode == 0 and out == "has that of faster\n"
    assert folder.stat().st_ino == built and os.listdir(tmp_path) == ["a"]


def test_a_folder_that_was_built_while_its_damaged_predecessor_was_read_stands(tmp_path, monkeypatch):
    """The slower one is at the end of its own build, and the folder that it reads by then has been moved away."""
    folder, hash_file, hashed = tmp_path / "a", cache_folders.hash_file, []

    def overtake(path: Path) -> str:
        found = hash_file(path)
        hashed.append(path)
        if hashed.count(folder / "rows.arrow") == 2:
            monkeypatch.setattr(cache_folders, "hash_file", hash_file)
            assert find_or_build("the cache", folder, fill("faster"))["by"] == "faster"
        return found

    find_or_build("the cache", folder, fill("first"))
    (folder / "rows.arrow").write_text("worst")
    monkeypatch.setattr(cache_folders, "hash_file", overtake)
    assert find_or_build("the cache", folder, fill("slower"))["by"] == "faster"
    assert (folder / "rows.arrow").read_text() == "faster" and os.listdir(tmp_path) == ["a"]


def test_what_a_killed_run_has_left_is_removed_after_a_day(tmp_path, capsys):
    with another_process(tmp_path, "killed", "in build") as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait(PATIENCE_S)
    (left,) = tmp_path.glob("unfinished-*")
    file = left / "content" / "rows.arrow"
    find_or_build("the cache", tmp_path / "a", fill("text"))
    assert file.exists()
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, time.time() - IDLE_S - 60))
    file.touch()
    find_or_build("the cache", tmp_path / "a", fill("text"))
    assert file.exists(), "somebody writes into it"
    os.utime(file, (0, time.time() - IDLE_S - 60))
    find_or_build("the cache", tmp_path / "a", fill("text"))
    assert capsys.readouterr().out == f"removed {left}, left behind by a killed run\n"
    assert os.listdir(tmp_path) == ["a"]


def test_a_cache_that_may_not_be_listed_or_written_is_one_sentence(tmp_path):
    """Root may read everything, so a name that is too long stands in for a folder that may not be entered."""
    (tmp_path / "file").touch()
    for name, sentence in (
        ("a" * 300, "cannot be read (File name too long): fix that, or set data.cache_dir"),
        ("file", "cannot be written (Not a directory): set data.cache_dir"),
    ):
        assert sentence in refusal(find_or_build, "the cache", tmp_path / name / "rows", fill("text"))
