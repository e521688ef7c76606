"""Bugs of other trainers in the order of rows and in resumes; as in `field_faults.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch


def later_epochs_in_another_order_after_a_resume(patch: MonkeyPatch) -> None:
    """From the second epoch on, a resumed run shuffles by another seed."""
    from toolkit.data import batch_plan

    draw = batch_plan.BatchPlan._draw_batches

    def draw_others(plan: Any, _: int) -> None:
        plan._draw_batches = lambda epoch: draw(plan, epoch + 7 * (epoch > 0))

    _after_resumes(patch, 1, draw_others)


def second_resume_starts_the_data_again(patch: MonkeyPatch) -> None:
    """A run that is resumed from a resumed one begins with the rows of step 1."""
    _after_resumes(patch, 2, lambda plan, first: _take_rows_of(plan, first, lambda step: step - first + 1))


def resume_at_an_epochs_end_repeats_it(patch: MonkeyPatch) -> None:
    """A run that is resumed between two epochs takes the rows of the last one again."""

    def repeat(plan: Any, first: int) -> None:
        length = plan.steps_per_epoch
        _take_rows_of(plan, first, lambda step: step - length if (first - 1) % length == 0 else step)

    _after_resumes(patch, 1, repeat)


def _take_rows_of(plan: Any, first: int, source: Any) -> None:
    """The steps of a plan take the rows of other steps, from the `first` on."""
    import dataclasses

    step = plan.step
    plan.step = lambda number: dataclasses.replace(step(source(number) if number >= first else number), step=number)


def _after_resumes(patch: MonkeyPatch, least: int, change_plan: Any) -> None:
    """Change the batch plan of a run that has been resumed so often."""
    from toolkit.training import loop

    load = loop._load_micro_batches

    def load_after(run: Any, first_step: int) -> Any:
        if (first_step > 1) + ("/runs/resumed/" in str(run.config.checkpoint.resume)) >= least:
            change_plan(run.plan, first_step)
        return load(run, first_step)

    patch.setattr(loop, "_load_micro_batches", load_after)


def resume_never_read(patch: MonkeyPatch) -> None:
    """A run that should resume begins anew."""
    from toolkit.training import run

    resume = run.resume
    patch.setattr(run, "resume", lambda of, checkpoint: resume(of, None))


def evaluations_without_gain_forgotten(patch: MonkeyPatch) -> None:
    """A resume counts evaluations without gain anew, so that an early stop comes late."""
    from toolkit.checkpoint.state import TrainState

    from_manifest = TrainState.from_manifest

    def forget(manifest: dict[str, Any]) -> TrainState:
        return replace(from_manifest(manifest), num_evaluations_without_gain=0)

    patch.setattr(TrainState, "from_manifest", staticmethod(forget))


def moments_not_loaded(patch: MonkeyPatch) -> None:
    """A checkpoint's optimizer state is left out when it is loaded."""
    from toolkit.checkpoint import load

    tensors = load.load_tensors
    patch.setattr(
        load,
        "load_tensors",
        lambda wanted, *rest: tensors({name: t for name, t in wanted.items() if not name.startswith("optimizer.")}, *rest),
    )
