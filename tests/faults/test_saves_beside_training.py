"""Saves of a run that goes on meanwhile: what is written is the run as it was, nothing ends before it is, and old ones go."""

from __future__ import annotations

import errno
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from tests.faults.harness import (
    NUM_STEPS,
    PATIENCE_S,
    SAVED,
    Fault,
    attempt_with,
    check_like_whole,
    check_one_sentence,
    resume,
    stopped_after,
    whole_checkpoints,
)
from tests.faults.workers.faulty_recipe import at_step, before, refuse, tell, this_rank
from tests.support.workbench import Workbench, step_name

# --- What is written is the run as it was, however long it takes.


def hold_until_next_save() -> None:
    """The thread writes nothing before the next save is asked; it is still at work then."""
    from toolkit.checkpoint import save as checkpoint_writer

    asked = threading.Event()
    save, save_tensors = checkpoint_writer.CheckpointWriter.save, checkpoint_writer.save_tensors

    def save_and_let_go(self: Any, state: Any, **options: Any) -> Any:
        if state.step > SAVED[0]:
            assert self.is_writing
            tell()
            threading.Timer(0.2, asked.set).start()  # it waits by then
        return save(self, state, **options)

    def wait_and_save(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert asked.wait(PATIENCE_S)
            asked.clear()
        return save_tensors(*arguments)

    checkpoint_writer.CheckpointWriter.save = save_and_let_go
    checkpoint_writer.save_tensors = wait_and_save


def test_later_steps_do_not_change_what_is_written(faulty_bench: Workbench) -> None:
    """Two updates are done meanwhile, and a save that is asked for waits for the one before."""
    outcome = attempt_with(faulty_bench, "held", hold_until_next_save)
    assert outcome.returncodes == [0, 0], outcome.stderr[-6000:]
    assert len(outcome.injected) == 4, "not two saves on each of two ranks that found the one before under way"
    check_like_whole(faulty_bench, "held", SAVED)
    done = [line["step"] for line in faulty_bench.lines("held", "checkpoint")]
    assert done == list(SAVED)


def load_after_save() -> None:
    """Once the checkpoint of step 2 stands, spoil all that a run consists of, and load it."""
    import torch

    from toolkit.checkpoint import load as checkpoint
    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.checkpoint.folders import step_folder
    from toolkit.checkpoint.manifest import read_checkpoint
    from toolkit.distributed.rng import capture_random_state, seed_all

    save = checkpoint_writer.CheckpointWriter.save

    def save_spoil_and_load(self: Any, state: Any, **options: Any) -> Any:
        done = save(self, state, **options)
        if state.step == 2:
            self.finish()
            random_state = capture_random_state()
            moments = [value for values in self.optimizer.state.values() for value in values.values()]
            with torch.no_grad():
                for tensor in [*self.sharded.model.parameters(), *moments]:
                    getattr(tensor, "to_local", lambda tensor=tensor: tensor)().fill_(3)
            seed_all("something else")
            saved = read_checkpoint(step_folder(self.run_folder, 2))
            assert checkpoint.load_checkpoint(saved, self.sharded, self.optimizer, self.identity) == state
            assert all(torch.equal(value, random_state[name]) for name, value in capture_random_state().items())
            tell()
        return done

    checkpoint_writer.CheckpointWriter.save = save_spoil_and_load


def test_a_load_right_after_a_save_brings_all_back(faulty_bench: Workbench) -> None:
    outcome = attempt_with(faulty_bench, "loaded", load_after_save)
    assert len(outcome.injected) == 2 and outcome.returncodes == [0, 0], outcome.stderr[-6000:]
    check_like_whole(faulty_bench, "loaded", SAVED)


# --- The last saves of a run.


def fail_when_next_is_asked(step: int) -> None:
    """The save of that step is still under way when the next one is asked, and fails then."""
    hold_until_next_save()
    refused_at(1, "open", rf"{{{step}}}.tmp/state/__1_0\.distcp w ")


def refused_at(rank: int, event: str, path: str) -> None:
    if this_rank() == rank:
        before(event, path, partial(refuse, errno.ENOSPC))


@pytest.mark.parametrize(
    ("fault", "failed", "stands"),
    [
        (partial(refused_at, 1, "open", r"{6}.tmp/state/__1_0\.distcp w "), 6, 4),
        (partial(fail_when_next_is_asked, 4), 4, 2),
    ],
    ids=["the last save fails", "the last but one fails late"],
)
def test_a_run_whose_end_is_not_saved_has_not_succeeded(
    faulty_bench: Workbench, fault: Fault, failed: int, stands: int, request: pytest.FixtureRequest
) -> None:
    bench, name = faulty_bench, request.node.callspec.id
    outcome = attempt_with(bench, name, fault)
    assert outcome.injected
    folder = bench.runs / name / "checkpoints" / step_name(failed)
    check_one_sentence(outcome, f"checkpoint {folder} could not be written: .*")
    assert whole_checkpoints(bench.runs / name) == [step for step in SAVED if step <= stands]
    resume(bench, name, from_step=stands)
    check_like_whole(bench, name, SAVED)


def stop_and_refuse() -> None:
    """SIGTERM in step 3, and a disk that takes no checkpoint of step 3 or 4."""
    if this_rank() == 1:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        before("open", r"step-0000000[34].tmp/state/__1_0\.distcp w ", partial(refuse, errno.ENOSPC))


def test_a_stop_that_cannot_save_does_not_say_it_has(faulty_bench: Workbench) -> None:
    bench, run = faulty_bench, stopped_after(faulty_bench, "stop", step=2)
    outcome = attempt_with(bench, run.name, stop_and_refuse, checkpoint__every_steps=6)
    assert outcome.injected
    check_one_sentence(outcome, rf"checkpoint {run}/checkpoints/step-0000000[34] could not be written: .*")
    assert "with a checkpoint" not in outcome.stdout
    resume(bench, run.name, from_step=2)
    check_like_whole(bench, run.name, SAVED)


# --- Old checkpoints that cannot be removed.

PRUNING: dict[str, tuple[str, str, str]] = {
    "the rename is refused": ("os.rename", r"{2} .*{2}\.removing", ""),
    "a later removal is refused": ("os.rmdir", "^state ", f"{step_name(2)}.removing"),
}


def refuse_to_remove(name: str) -> None:
    if this_rank() == 0:
        event, path, standing = PRUNING[name]
        before(event, path, partial(refuse, errno.EBUSY), standing=standing)


@pytest.mark.parametrize("name", PRUNING)
def test_what_cannot_be_removed_is_reported_and_removed_later(faulty_bench: Workbench, name: str) -> None:
    """In the save of step 4; that of step 6 tries again."""
    outcome = attempt_with(faulty_bench, name, partial(refuse_to_remove, name), checkpoint__keep_last=1)
    assert outcome.injected and outcome.returncodes == [0, 0], outcome.stderr[-6000:]
    assert outcome.stdout.count("could not be removed") == 1, outcome.stdout
    assert f"{step_name(2)}" in next(line for line in outcome.stdout.splitlines() if "could not be removed" in line)
    check_like_whole(faulty_bench, name, (NUM_STEPS,))
