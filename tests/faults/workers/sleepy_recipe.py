"""A recipe whose rank 1 falls asleep in step 3: `sleepy_recipe.py WHERE RECIPE FLAGS…`, started by test_hangs.py."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from tests.support.launch import REPOSITORY
from toolkit.checkpoint import save as checkpoint_writer
from toolkit.distributed.comm import rank
from toolkit.training import after_step, loop

FOREVER_S = 600.0
STEP = 3

step_now = 0


def sleep_if_chosen(step: int | None = None) -> None:
    """Sleep on rank 1 in step 3: of `step`, where that is not the step the loop is in."""
    if rank() == 1 and (step_now if step is None else step) == STEP:
        time.sleep(FOREVER_S)


def forward_and_backward() -> Any:
    """In the model's forward."""
    summed_loss = loop.summed_loss

    def sleep_first(*args: Any, **kwargs: Any) -> Any:
        sleep_if_chosen()
        return summed_loss(*args, **kwargs)

    return patch.object(loop, "summed_loss", sleep_first)


def loading_rows() -> Any:
    """In what reads and collates the rows."""
    load = loop.load_micro_batches

    def load_sleepily(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for micro_batch, batch in load(*args, **kwargs):
            sleep_if_chosen(micro_batch.step)
            yield micro_batch, batch

    return patch.object(loop, "load_micro_batches", load_sleepily)


def update() -> Any:
    """Between the gradients and the optimizer."""
    clip = loop.clip_gradients

    def clip_sleepily(*args: Any) -> Any:
        sleep_if_chosen()
        return clip(*args)

    return patch.object(loop, "clip_gradients", clip_sleepily)


def evaluation() -> Any:
    """Between two batches of an evaluation."""
    evaluate = after_step.evaluate

    def evaluate_sleepily(*args: Any) -> Any:
        *others, between_batches = args

        def go_on_and_sleep() -> None:
            between_batches()
            sleep_if_chosen()

        return evaluate(*others, go_on_and_sleep)

    return patch.object(after_step, "evaluate", evaluate_sleepily)


def saving() -> Any:
    """In the thread that writes the first checkpoint, that of step 3, whatever step the loop has come to meanwhile."""
    describe = checkpoint_writer.describe_files

    def describe_sleepily(*args: Any) -> Any:
        sleep_if_chosen(STEP)
        return describe(*args)

    return patch.object(checkpoint_writer, "describe_files", describe_sleepily)


PLACES: dict[str, Callable[[], Any]] = {
    "forward and backward": forward_and_backward,
    "loading rows": loading_rows,
    "update": update,
    "evaluation": evaluation,
    "saving": saving,
}


def main(where: str, recipe: str, *flags: str) -> None:
    """The recipe as it stands, but for the sleep."""
    train_step = loop.train_step

    def train_step_and_tell(session: Any, step: Any, *args: Any) -> Any:
        global step_now
        step_now = step.step
        return train_step(session, step, *args)

    path = REPOSITORY / "recipes" / f"{recipe}.py"
    with patch.object(loop, "train_step", train_step_and_tell), PLACES[where](), patch.object(sys, "argv", [str(path), *flags]):
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
