"""Saves of a run that goes on meanwhile: what is written is the run as it was, however long it takes."""

from __future__ import annotations

from typing import Any

from tests.faults.harness import SAVED, attempt_with, check_like_whole
from tests.faults.refusals import hold_until_next_save
from tests.faults.workers.faulty_recipe import tell
from tests.support.workbench import Workbench


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
    from toolkit.checkpoint.manifest import read_checkpoint, step_folder
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
