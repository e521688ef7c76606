"""Starts accelerate's trackers by name, and sends figures to them."""

from __future__ import annotations

import json
from typing import Any

from toolkit.config.schema import TrackingConfig
from toolkit.distributed.comm import barrier
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError

# The option for a run's name in each of accelerate's trackers; the others have only a project name.
_RUN_NAME_OPTION = {
    "wandb": "name",
    "trackio": "name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
    "mlflow": "run_name",
}


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker that accelerate does not know or that is not installed; accelerate would silently skip it.

    Raises:
        UserError: names the tracker and those that would work.
    """
    if not config.log_with:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    built_in = {str(name) for name in LoggerType}
    usable = {str(name) for name in get_available_trackers()} | (set(LOGGER_TYPE_TO_CLASS) - built_in)
    for name in config.log_with:
        if name in usable:
            continue
        trouble = "is not installed" if name in LOGGER_TYPE_TO_CLASS else "is not a tracker that accelerate knows"
        choice = f"installed are {', '.join(sorted(usable))}" if usable else "none is installed"
        raise UserError(f"tracking.log_with: {name!r} {trouble}; {choice} (metrics.jsonl is written in any case)")


def start_trackers(accelerator: Any, config: TrackingConfig, run_name: str, flat_config: dict[str, Any]) -> None:
    """Start the trackers that the `Accelerator` was built with (`log_with`), with the run's dotted config."""
    if not config.log_with:
        return
    working("starting the trackers")
    # Trackers accept only numbers, strings and booleans (accelerate's tensorboard fails on None and on lists).
    plain = {key: value if isinstance(value, int | float | str) else json.dumps(value) for key, value in flat_config.items()}
    names = {tracker: {_RUN_NAME_OPTION[tracker]: run_name} for tracker in config.log_with if tracker in _RUN_NAME_OPTION}
    accelerator.init_trackers(config.project_name, config=plain, init_kwargs=names)


def log_to_trackers(accelerator: Any, figures: dict[str, Any], step: int) -> None:
    """Send the numbers among `figures` to every tracker; does nothing without trackers."""
    numbers = {key: value for key, value in figures.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    if numbers:
        accelerator.log(numbers, step=step)


def close_trackers(accelerator: Any) -> None:
    """Finish every tracker; no rank leaves before. Collective.

    A tracker may upload for minutes, on rank 0 alone, and the launcher kills rank 0 soon after another rank has left.
    """
    working("closing the trackers")
    for tracker in accelerator.trackers:
        tracker.finish()
    barrier()
