"""A disk that is full outside of checkpoints, and caches that are damaged: one sentence, nothing half written, what stood stands.

The disk is a small real one where this process may mount it, and full from the moment that a file or folder is about to be made;
elsewhere that file or folder is refused.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.harness import SAVED, Outcome, attempt_with, check_like_whole, check_one_sentence
from tests.faults.test_refusals import can_mount, mounted
from tests.faults.workers.faulty_recipe import before, kill, refuse, tell, this_rank
from tests.support.workbench import Workbench

PAGE_BYTES = 4096
FILLER = "filler"
FULL = "No space left on device"
ROOM = r"make room there, or set data\.cache_dir"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """The folder on a disk of its own, if that can be."""
    folder.mkdir()
    if not can_mount():
        yield
        return
    with mounted(folder, "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        yield


def fill(disk: Path, spare_pages: int) -> None:
    """Leave room for so many more pages of 4 KiB."""
    if not disk.is_mount():
        refuse(errno.ENOSPC)
    tell()
    with suppress(OSError), (disk / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(PAGE_BYTES))
    os.truncate(disk / FILLER, (disk / FILLER).stat().st_size - spare_pages * PAGE_BYTES)


def fill_before(event: str, path: str, disk: Path, spare_pages: int) -> None:
    if this_rank() == 0:
        before(event, path, partial(fill, disk, spare_pages), standing="/")


def kill_in_the_token_cache() -> None:
    if this_rank() == 0:
        before("open", r"/cache/unfinished-[^/]*/content/tokenizer/", partial(kill, 0, 1), standing="/")


def test_each_place_of_a_full_disk_and_the_same_command_completes(faulty_bench: Workbench, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    cache, runs = disk / "cache", disk / "runs"
    bench = replace(faulty_bench, runs=runs)
    run = runs / "full"

    def attempt(event: str, path: str, spare_pages: int) -> Outcome:
        faults = [partial(fill_before, event, path, disk, spare_pages)] if event else []
        settings = {"data__cache_dir": cache, "eval__generate": True, "eval__every_steps": None}
        outcome = attempt_with(bench, "full", *faults, exports=True, **settings)
        (disk / FILLER).unlink(missing_ok=True)
        assert not [*disk.rglob("unfinished-*"), *disk.rglob("*.tmp"), *disk.rglob("*.mode")]
        return outcome

    def is_refused(event: str, path: str, spare_pages: int, sentence: str) -> Outcome:
        outcome = attempt(event, path, spare_pages)
        assert outcome.injected, outcome.stderr[-3000:]
        check_one_sentence(outcome, sentence)
        return outcome

    with small_disk(disk):
        # The caches: before there is an unfinished folder, rows, tokens, and the tokenizer, which is written by Rust.
        is_refused(
            "os.mkdir", "cache/rows/unfinished-[^/]* ", 0, rf"the cache .* cannot be written .*{FULL}.*set data\.cache_dir"
        )
        is_refused("open", "cache/rows/.*/train.arrow w", 0, rf"the cache of rows cannot be written to .* \({FULL}\): {ROOM}")
        assert os.listdir(cache / "rows") == []
        is_refused("os.mkdir", "cache/unfinished-[^/]*/content ", 0, rf"the token cache cannot be written .* \({FULL}\): {ROOM}")
        path = "cache/unfinished-.*/tokenizer/tokenizer_config.json w"
        is_refused("open", path, 1, rf"the token cache cannot be written to {cache} \({FULL}\): {ROOM}")
        assert os.listdir(cache) == ["rows"] and len(os.listdir(cache / "rows")) == 1

        # The run: its config, and the predictions of its evaluation.
        is_refused("open", r"full/config\.yaml", 0, rf"{run}/config\.yaml cannot be written \({FULL}\): .*")
        is_refused("open", r"predictions-6\.jsonl", 0, rf"the predictions {run}/predictions-6\.jsonl could not be .*: {FULL}")
        assert not list(run.glob("predictions-*"))

        # Its end: an older export and picture stand, and all is printed that can be.
        older = [run / "export" / "old", run / "export_check.safetensors", run / "curves.png"]
        for file in older:
            file.parent.mkdir(exist_ok=True)
            file.write_text("old")
        sentence = rf"the export {run}/export could not be written \({FULL}\): .*"
        is_refused("open", r"export\.tmp/model\.safetensors r\+", 0, sentence)  # between two gathers of all ranks
        is_refused("open", r"export\.tmp/tokenizer_config\.json w", 1, sentence)
        assert os.listdir(run / "export") == ["old"] and all(file.read_text() == "old" for file in older)
        outcome = is_refused("open", r"curves\.png", 1, rf"{run}/curves\.png could not be written \({FULL}\): make room there.*")
        assert "lead sentence" in outcome.stdout and f"exported to {run}/export\n" in outcome.stdout
        assert older[2].read_text() == "old" and (run / "export" / "tokenizer.json").exists()
        outcome = attempt("", "", 0)
        assert outcome.returncodes == [0, 0], outcome.stderr[-3000:]
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG") and not list(run.glob("*.old"))


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_caches_are_named_and_built_again(faulty_bench: Workbench, tmp_path: Path) -> None:
    """Also what a run has left that was killed while it built one."""
    cache, name = tmp_path / "cache", "caches"
    killed = attempt_with(faulty_bench, name, kill_in_the_token_cache, data__cache_dir=cache)
    assert killed.injected
    (left,) = cache.glob("unfinished-*")
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))  # for more than a day nothing was written into it
    damage(next((cache / "rows").glob("*/train.arrow")))
    outcome = attempt_with(faulty_bench, name, data__cache_dir=cache)
    assert outcome.returncodes == [0, 0], outcome.stderr[-3000:]
    assert f"removed {left}, left behind by a killed run\n" in outcome.stdout
    again = r"^WARNING: the cache of rows .* is damaged: it is built again$"
    assert re.search(again, outcome.stderr, re.MULTILINE), outcome.stderr
    check_like_whole(faulty_bench, name, SAVED)
    damage(next(cache.glob("*/train/*.arrow")))
    outcome = attempt_with(faulty_bench, name, data__cache_dir=cache)
    assert outcome.returncodes == [0, 0], outcome.stderr[-3000:]
    assert re.search(again.replace("cache of rows", "token cache"), outcome.stderr, re.MULTILINE), outcome.stderr
    assert "resuming from" in outcome.stdout, "the tokens are those that the run was trained on"
    check_like_whole(faulty_bench, name, SAVED)
    assert not list(cache.rglob("unfinished-*"))
