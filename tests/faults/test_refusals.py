"""What the system refuses: a full disk, a read error, no memory, a terminal that is gone.

The run ends on all ranks with one sentence and goes on from the last checkpoint as if nothing had been, or comes to its end
without what it lost. Most rows go on from the checkpoint of step 2, and what cannot be saved is that of step 3.
"""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.faults import refusals as fault
from tests.faults.harness import (
    SAVED,
    Fault,
    attempt_with,
    check_like_whole,
    complete_checkpoints,
    num_strikes,
    resume,
    stopped_after,
)
from tests.faults.refusals import on_rank, save_by_step_4
from tests.faults.workers.faulty_recipe import refuse
from tests.support.launch import LaunchResult
from tests.support.workbench import step_name
from toolkit.errors import EXIT_STOPPED

EVERY_3 = {"checkpoint__every_steps": 3}
WAITED_FOR = EVERY_3 | {"checkpoint__async_save": False}
SHARD = r"step-0000000[%s].tmp/state/__1_0\.distcp w "
MANIFEST = r"{3}.tmp/manifest\.json\.tmp w "
READ_ONLY_NOW, NO_ROOM = partial(refuse, errno.EROFS), partial(refuse, errno.ENOSPC)
NO_SPACE, FULL = "No space left on device", "File too large"
UNSAVED = "checkpoint .*/checkpoints/step-0000000[%s] could not be written: .*"
UNSAVED_3 = UNSAVED % 3
IO = "the system refuses: Input/output error.*; check that disk or network file system, and start the same command again"
RESUMED = ("end of a shard", "rename", "last save", "lines of training", "rows")
"""One for each kind of thing that is left behind."""

# Name: what happens, the sentence, the checkpoint that stands then (0: a new run, without a cache), settings.
REFUSED = {
    # A save, in its own thread or waited for.
    "end of a shard": (
        partial(save_by_step_4, partial(on_rank, 1, "open", SHARD % 3, partial(fault.limit_files, 300_000))),
        f"{UNSAVED_3}{FULL}.*", 2, EVERY_3,
    ),
    "shard, waited for": (
        partial(on_rank, 1, "open", SHARD % 3, partial(fault.limit_files, 20_000)), f"{UNSAVED_3}{FULL}.*", 2, WAITED_FOR,
    ),
    "manifest": (
        partial(save_by_step_4, partial(on_rank, 0, "open", MANIFEST, NO_ROOM)), f"{UNSAVED_3}{NO_SPACE}.*", 2, EVERY_3,
    ),
    "rename": (
        partial(save_by_step_4, partial(on_rank, 0, "os.rename", "{3}.tmp .*{3} ", READ_ONLY_NOW)),
        f"{UNSAVED_3}Read-only file system.*", 2, EVERY_3,
    ),
    "last save": (partial(on_rank, 1, "open", SHARD % 6, NO_ROOM), UNSAVED % 6, 4, {}),
    "last but one, late": (partial(fault.fail_when_next_is_asked, SHARD % 4), UNSAVED % 4, 2, {}),
    "at a stop": (partial(fault.stop_and_refuse, SHARD % 34), UNSAVED % 34, 2, {"checkpoint__every_steps": 6}),
    # The figures: no checkpoint is newer than its lines.
    "lines of training": (partial(fault.full_from, "train", 5), rf".*/metrics\.jsonl cannot .* \({FULL}\): fix.*", 4, {}),
    "rows": (partial(on_rank, 1, "open", r"rows-00001\.jsonl a ", NO_ROOM), r".*/rows-00001\.jsonl cannot be written .*", 2, {}),
    # Anything else, of one rank.
    "opening tokens": (fault.refuse_to_open_tokens, IO, 0, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_ends_the_run_which_goes_on_from_the_last_checkpoint(faulty_bench, name):
    bench, (what, sentence, stands, changes) = faulty_bench, REFUSED[name]
    if stands:
        run = stopped_after(bench, name, step=2)
    else:
        changes = {"data__cache_dir": bench.runs / f"cache for {name}"}
    outcome = attempt_with(bench, name, what, log_every_steps=50, **changes)
    check_refused(outcome, sentence)
    assert "CheckpointException" not in outcome.stderr and "with a checkpoint" not in outcome.stdout, outcome.stderr
    if EVERY_3.items() <= changes.items():
        assert bench.lines(name, "train")[-1]["step"] <= 5, "ended later than after the step that follows"
    if stands:
        assert max(complete_checkpoints(run)) == stands and max(bench.checkpoints(name)) == step_name(stands)
    if name in RESUMED:
        resume(bench, name, from_step=stands)
        check_like_whole(bench, name, SAVED)


def check_refused(outcome: LaunchResult, sentence: str) -> None:
    """Something struck, and `LaunchResult.refusal` is what the regular expression `sentence` says."""
    assert num_strikes(outcome), outcome.stderr[-3000:]
    assert re.fullmatch(sentence, outcome.refusal()), outcome.refusal()


def test_a_writer_that_dies_of_its_own_error_ends_the_run(faulty_bench):
    """Which no system is the cause of: the error is named."""
    run = stopped_after(faulty_bench, "dead writer", step=2)
    dies = partial(on_rank, 1, "open", r"{3}.tmp/rng-00001\.safetensors r ", partial(fault.die, SystemExit))
    outcome = attempt_with(faulty_bench, run.name, partial(save_by_step_4, dies), **EVERY_3)
    assert num_strikes(outcome) and all(code > 0 for code in outcome.returncodes), outcome.stderr[-6000:]
    said = f"checkpoint {run / 'checkpoints' / step_name(3)} could not be written: SystemExit"
    assert said in outcome.stderr and complete_checkpoints(run) == [2], outcome.stderr[-6000:]


def test_later_steps_do_not_change_what_a_save_beside_them_writes(faulty_bench):
    """Two updates are done meanwhile, and a save that is asked for waits for the one before."""
    outcome = attempt_with(faulty_bench, "held", fault.hold_until_next_save)
    assert outcome.returncodes == [0, 0], outcome.stderr[-6000:]
    assert num_strikes(outcome) == 4, "not two saves on each of two ranks that found the one before under way"
    check_like_whole(faulty_bench, "held", SAVED)
    assert [line["step"] for line in faulty_bench.lines("held", "checkpoint")] == list(SAVED)


# --- What ends no run; more outputs that are lost: `tests/unit/launch/test_log.py`.


def test_a_run_whose_terminal_is_closed_comes_to_its_end(faulty_bench):
    short = {"train__max_steps": 3, "eval__at_start": True, "exports": True}
    outcome = attempt_with(faulty_bench, "terminal", partial(fault.lose, 1, 2, is_terminal=True), **short)
    assert num_strikes(outcome) and outcome.returncodes == [0, 0], outcome.stderr[-4000:]
    run = faulty_bench.runs / "terminal"
    assert (run / "report.html").exists() and (run / "export" / "model.safetensors").exists()
    lost = [(line["name"], line["reason"]) for line in faulty_bench.lines("terminal", "lost_output")]
    assert ("stdout", "Input/output error") in lost


def test_ctrl_c_that_ends_the_reader_too_loses_no_step(faulty_bench):
    outcome = attempt_with(faulty_bench, "tee", partial(fault.interrupt_with_its_reader, 5))
    assert outcome.returncodes == [EXIT_STOPPED] * 2, outcome.stderr[-4000:]
    assert max(faulty_bench.checkpoints("tee")) >= step_name(5)
    [noted] = faulty_bench.lines("tee", "lost_output")
    assert (noted["name"], noted["reason"]) == ("stdout", "Broken pipe")


# --- A disk that is full at each place that a run writes to: a small real one where this process may mount it, and full from the
# moment that a file or folder is about to be made; elsewhere that file or folder is refused.


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """The folder on a disk of its own, if that can be."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_each_place_of_a_full_disk_and_the_same_command_completes(faulty_bench, tmp_path):
    disk = tmp_path / "disk"
    cache, run = disk / "cache", disk / "runs" / "full"
    bench = replace(faulty_bench, runs=disk / "runs")

    def attempt(*faults: Fault) -> LaunchResult:
        settings = {"data__cache_dir": cache, "eval__generate": True, "eval__every_steps": None}
        outcome = attempt_with(bench, "full", *faults, exports=True, **settings)
        (disk / "filler").unlink(missing_ok=True)
        left = [*disk.rglob("unfinished-*"), *disk.rglob("*.tmp"), *disk.rglob("*.mode")]
        assert [path for path in left if "checkpoints" not in path.parts] == []
        return outcome

    def is_refused(event: str, path: str, spare_pages: int, sentence: str) -> LaunchResult:
        outcome = attempt(partial(on_rank, 0, event, path, partial(fault.fill, disk, spare_pages), standing="/"))
        check_refused(outcome, sentence)
        return outcome

    room = rf"\({NO_SPACE}\): make room there, or set data\.cache_dir"
    with small_disk(disk):
        # The caches: before there is an unfinished folder, rows, tokens, and the tokenizer, which is written by Rust.
        is_refused(
            "os.mkdir", "cache/rows/unfinished-[^/]* ", 0, rf"the cache .* cannot be written .*{NO_SPACE}.*set data\.cache_dir"
        )
        is_refused("open", "cache/rows/.*/train.arrow w", 0, f"the cache of rows cannot be written to .* {room}")
        assert os.listdir(cache / "rows") == []
        path = "cache/unfinished-.*/tokenizer/tokenizer_config.json w"
        is_refused("open", path, 1, f"the token cache cannot be written to {cache} {room}")
        assert os.listdir(cache) == ["rows"] and len(os.listdir(cache / "rows")) == 1

        # The run: its config, a checkpoint, and the predictions of its evaluation.
        is_refused("open", r"full/config\.yaml", 0, rf"{run}/config\.yaml cannot be written \({NO_SPACE}\): .*")
        is_refused("open", r"{4}.tmp/state/__0_0\.distcp w ", 0, f"{UNSAVED % 4}{NO_SPACE}.*")
        assert complete_checkpoints(run) == [2]
        is_refused(
            "open",
            r"predictions-6\.jsonl",
            0,
            rf"the predictions {run}/predictions-6\.jsonl could not be .* \({NO_SPACE}\): fix .*",
        )
        assert not list(run.glob("predictions-*"))

        # Its end: an older export and picture stand, and all is printed that can be.
        older = [run / "export" / "old", run / "export_check.safetensors", run / "curves.png"]
        for file in older:
            file.parent.mkdir(exist_ok=True)
            file.write_text("old")
        sentence = rf"the export {run}/export could not be written \({NO_SPACE}\): .*"
        is_refused("open", r"export\.tmp/model\.safetensors r\+", 0, sentence)  # between two gathers of all ranks
        is_refused("open", r"export\.tmp/tokenizer_config\.json w", 1, sentence)
        assert os.listdir(run / "export") == ["old"] and all(file.read_text() == "old" for file in older)
        outcome = is_refused(
            "open", r"curves\.png", 1, rf"{run}/curves\.png could not be written \({NO_SPACE}\): make room there.*"
        )
        assert "lead sentence" in outcome.stdout and f"exported to {run}/export\n" in outcome.stdout
        assert older[2].read_text() == "old" and (run / "export" / "tokenizer.json").exists()
        outcome = attempt()
        assert outcome.returncodes == [0, 0], outcome.stderr[-3000:]
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG") and not list(run.glob("*.old"))
