"""`record.json` in the run folder: what a report needs and only the run itself knows."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.distributed.comm import rank, world_size
from toolkit.files.durable import save_json
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.same_run import installed_versions
from toolkit.parallel.units import ShardUnit, describe_units

logger = logging.getLogger("toolkit")

RECORD_FILE = "record.json"
MOST_PREDICTIONS = 1000
"""Rows whose texts a page shows, at even distances."""
LONGEST_TEXT = 4000
"""Characters of a text on a page."""


def save_record(run_folder: Path, units: Sequence[ShardUnit], about_rows: Callable[[], dict[str, Any]] = dict) -> None:
    """Write `record.json` on rank 0, with the part `about_rows`. What fails is a warning: a run is worth more than its report."""
    if rank() != 0:
        return
    try:
        record = {
            "versions": installed_versions(),
            "command": _command(),
            "num_processes": world_size(),
            "started": time.strftime("%Y-%m-%d %H:%M"),
            "units": describe_units(units),
            **about_rows(),
        }
        save_json(run_folder / RECORD_FILE, record)
    except Exception as error:
        logger.warning(f"{run_folder / RECORD_FILE} could not be written ({error}): the report lacks what it holds")


def _command() -> str | None:
    """The command that began this process; None in a notebook or another program."""
    if not sys.argv[0].endswith(".py") or Path(sys.argv[0]).name == "ipykernel_launcher.py":
        return None
    preset = find_accelerate_yaml()
    launch = ["accelerate", "launch", "--config_file", str(preset)] if preset else ["python"]
    return shlex.join([*launch, *sys.argv])
