"""A run that hangs ends: every rank shows its stacks and exits with code 124, and the one that did not arrive is named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.workers import hanging_ranks, waiting_recipe
from tests.faults.workers.waiting_recipe import STEP
from tests.support.launch import LaunchResult, Running, start
from tests.support.real_launch import accelerate_launch, finish
from tests.support.small_run import write_inputs
from toolkit.distributed.rank_status import hang_file
from toolkit.errors import EXIT_HANG

FP32 = {"mixed_precision": "no"}
TIMEOUT_S = 2
"""Of the watchdog."""
END_S = 300.0
"""Until when a run must have ended."""


def hang(way: str, folder: Path, *, preset: str = "fsdp2_cpu") -> Running:
    """Start ranks that hang."""
    return start(hanging_ranks.__file__, [way, str(folder), str(TIMEOUT_S)], preset=preset)


def error_lines(stderr: str) -> list[str]:
    """The sentences of all ranks."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def check_hang(result: LaunchResult, folder: Path, sentence: str, timeout_s: float = TIMEOUT_S) -> None:
    """Both ranks said the sentence (`…` stands for anything) and left their stacks."""
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    start, end = f"error: no progress for {timeout_s} s (run.timeout_s): ", f". Stacks are in {folder}/hang-rank-*.txt."
    pattern = ".+".join(re.escape(part) for part in f"{start}{sentence}{end}".split("…"))
    sentences = error_lines(result.stderr)
    assert len(sentences) == 2 and sentences[0] == sentences[1]
    assert re.fullmatch(pattern, sentences[0]), f"{sentences[0]}\nis not\n{start}{sentence}{end}"
    for rank in range(2):
        text = hang_file(folder, rank).read_text()
        assert sentences[0] in text and "most recent call first" in text


@pytest.mark.parametrize(
    ("way", "sentence", "sleeper"),
    [
        (
            "sleep_before_new_group",
            "rank 1 did not arrive: in step 1, start, for … s, at hanging_ranks.py:… in sleepy_compute",
            1,
        ),
        (
            "wait_for_each_other",
            "ranks 0 and 1 stopped moving, none behind the others: in step 7, evaluation, for … s, at …",
            None,
        ),
    ],
    ids=["sleep_before_new_group", "wait_for_each_other"],
)
def test_a_rank_that_does_not_arrive(way: str, sentence: str, sleeper: int | None, tmp_path: Path) -> None:
    with hang(way, tmp_path) as running:
        result = running.wait(END_S)
    check_hang(result, tmp_path, sentence)
    for rank in range(2):  # the stacks of both, in the files and on stderr: who sleeps and who waits
        assert ("in sleepy_compute" in hang_file(tmp_path, rank).read_text().split("\n", 2)[2]) == (rank == sleeper)
    assert result.stderr.count("in _end") == 2


@pytest.mark.parametrize(
    ("stopped", "sentence"),
    [
        (1, "rank 1 did not arrive: no answer, last heard of in step 2, saving"),
        # Without torch elastic, rank 0 is the store's host: nobody can be asked.
        (0, "rank 1 stopped moving: in step 2, saving, for"),
    ],
    ids=["rank_1", "rank_0"],
)
def test_a_stopped_rank(stopped: int, sentence: str, tmp_path: Path) -> None:
    other = 1 - stopped
    with hang(f"stop_rank_{stopped}", tmp_path) as running:
        wait_until(lambda: not is_alive(running.pids[other]), running)
        os.kill(running.pids[stopped], signal.SIGKILL)
        result = running.wait(END_S)
    assert result.returncodes[other] == EXIT_HANG and result.returncodes[stopped] == -signal.SIGKILL
    (said_once,) = error_lines(result.stderr)
    assert sentence in said_once
    assert ("cannot be asked" in said_once) == (stopped == 0)
    assert hang_file(tmp_path, other).exists() and not hang_file(tmp_path, stopped).exists()


def test_one_process_hangs_alone(tmp_path: Path) -> None:
    with hang("hang_alone", tmp_path, preset="single") as running:
        result = running.wait(END_S)
    assert result.returncodes == [EXIT_HANG]
    assert "rank 0 stopped moving: in step 5, update, for" in error_lines(result.stderr)[0]
    assert "sleepy_compute" in hang_file(tmp_path, 0).read_text()


@pytest.mark.parametrize(
    ("way", "preset"), [("be_slow", "fsdp2_cpu"), ("leave_while_peer_is_busy", "fsdp2_cpu"), ("be_suspended", "single")]
)
def test_no_hang(way: str, preset: str, tmp_path: Path) -> None:
    """A rank that others wait for but that moves; ranks that leave one by one; a job that is suspended and goes on."""
    with hang(way, tmp_path, preset=preset) as running:
        result = running.wait(END_S)
    assert not any(result.returncodes), result.stderr[-3000:]
    assert result.stdout.count("came to the end") == len(result.returncodes)
    assert list(tmp_path.iterdir()) == []


def test_every_rank_shows_its_stacks_under_the_real_launcher(tmp_path: Path) -> None:
    """It ends the other ranks a tenth of a second after one has ended."""
    argv = ["sleep_in_compute", tmp_path, str(TIMEOUT_S)]
    launcher = accelerate_launch(hanging_ranks.__file__, argv, folder=tmp_path, preset="ddp_cpu")
    printed = finish(launcher)
    assert launcher.returncode != 0
    assert f"exitcode  : {EXIT_HANG}" in printed, printed[-3000:]
    # Of each rank, in one write; it may stand within a line of the other rank's stacks, which are written in pieces.
    said = f"error: no progress for {TIMEOUT_S:g} s (run.timeout_s): rank 1 did not arrive: in step 4"
    assert printed.count(said) == 2, printed[-3000:]
    assert all("most recent call first" in hang_file(tmp_path, rank).read_text() for rank in range(2))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's config and rows."""
    folder = tmp_path_factory.mktemp("hangs")
    write_inputs(folder)
    return folder


def hold_up(inputs: Path, name: str, holds: list[tuple[str, int, str]], cache: str = "cache") -> Running:
    """Start a small run of a recipe whose ranks are held up."""
    flags = [
        "--model.name_or_path", str(inputs / "model"), "--model.from_scratch", "true",
        "--data.source", "jsonl", "--data.files", str(inputs / "rows.jsonl"), "--data.cache_dir", str(inputs / cache),
        "--data.eval_fraction", "0.1", "--train.max_steps", "5", "--train.global_batch_size_rows", "16",
        "--eval.at_start", "false", "--eval.every_steps", "3", "--eval.max_new_tokens", "4", "--checkpoint.every_steps", "3",
        "--run.output_dir", str(inputs / "runs"), "--run.name", name, "--run.timeout_s", str(waiting_recipe.TIMEOUT_S),
    ]  # fmt: skip
    argv = [json.dumps(holds), "t5", *flags]
    return start(waiting_recipe.__file__, argv, preset="fsdp2_cpu", overrides=FP32)


@pytest.fixture(scope="module")
def slow_run(inputs: Path) -> Path:
    """A run that its ranks waited for much longer than the patience, while rank 0 computed and, later, wrote slowly."""
    holds = [("tokenizing", 0, "compute"), ("saving", 0, "compute"), ("export", 0, "write_slowly")]
    with hold_up(inputs, "slow", holds, cache="slow") as running:
        result = running.wait(2 * END_S)
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    return inputs / "runs" / "slow"


def test_long_work_that_moves_is_never_ended(slow_run: Path) -> None:
    assert (slow_run / "export" / "config.json").exists() and list(slow_run.glob("hang-rank-*")) == []


PLACES = {
    "evaluation": (1, f"step {STEP}, evaluation, for … s, at waiting_recipe.py:… in sleep"),
    "saving": (1, "step 5, saving, for … s, at …"),  # the thread that writes sleeps while training goes on, up to the last save
    "tokenizing": (0, "tokenizing, for … s, at waiting_recipe.py:… in sleep"),
    "loading the checkpoint": (1, "loading the checkpoint, for … s, at waiting_recipe.py:… in sleep"),
    "export": (0, "export, for … s, at waiting_recipe.py:… in sleep"),
}
"""By where a rank sleeps: which one, and what is said of it."""


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_sleeps_is_named_with_its_place(place: str, inputs: Path, request: pytest.FixtureRequest) -> None:
    (rank, where), name = PLACES[place], place.replace(" ", "_")
    cache = {"tokenizing": name, "loading the checkpoint": "slow"}.get(place, "cache")  # not done yet, done
    if place == "loading the checkpoint":
        request.getfixturevalue("slow_run").rename(inputs / "runs" / name)
    with hold_up(inputs, name, [(place, rank, "sleep")], cache) as running:
        result = running.wait(2 * END_S)
    check_hang(result, inputs / "runs" / name, f"rank {rank} did not arrive: in {where}", timeout_s=waiting_recipe.TIMEOUT_S)
    assert "in sleep" in hang_file(inputs / "runs" / name, rank).read_text()


def test_a_rank_that_does_not_come_to_the_first_connection_of_the_devices(inputs: Path) -> None:
    with hold_up(inputs, "unconnected", [("connecting the devices", 1, "sleep")]) as running:
        result = running.wait(END_S)
    assert result.returncodes == [EXIT_HANG] * 2, result.stderr[-3000:]
    where = "in building the accelerator, for "
    head = f"error: no progress for {waiting_recipe.TIMEOUT_S} s (run.timeout_s): rank 1 did not arrive: {where}"
    assert [line.startswith(head) for line in error_lines(result.stderr)] == [True, True], result.stderr[-3000:]
    assert result.stderr.count("in connect_devices") == 1, "rank 0 waits there"


def test_a_rank_that_is_stopped_while_another_tokenizes(inputs: Path) -> None:
    """The rank that works is not ended before it waits itself."""
    holds = [("after tokenizing", 1, "stop"), ("tokenizing", 0, "compute")]
    with hold_up(inputs, "stopped", holds, cache="stopped") as running:
        wait_until(lambda: not is_alive(running.pids[0]), running)
        os.kill(running.pids[1], signal.SIGKILL)
        result = running.wait(END_S)
    assert result.returncodes == [EXIT_HANG, -signal.SIGKILL]
    (said_once,) = error_lines(result.stderr)
    assert "rank 1 did not arrive: no answer, last heard of in tokenizing. Stacks" in said_once
    assert "in raise_together" in hang_file(inputs / "runs" / "stopped", 0).read_text()


def is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; not where it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], running: Running) -> None:
    """Wait for it; AssertionError after `END_S`."""
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, running.last_words()
        time.sleep(0.1)
