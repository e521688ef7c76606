"""A recipe that only trains, for `mfu.py`: `mfu_side.py RECIPE.py FLAG...`.

The checkpoint and the export at its end are left out: an 8B model's take 130 GB of disk, and say nothing about its speed.
"""

from __future__ import annotations

import runpy
import sys
from unittest import mock

from toolkit.checkpoint.save import CheckpointWriter
from toolkit.training import finetune
from toolkit.training.run import leave


def main() -> None:
    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    with (
        mock.patch.object(CheckpointWriter, "save", lambda *_, **__: None),
        mock.patch.object(finetune, "finish", lambda run: leave(run.trackers)),
    ):
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
