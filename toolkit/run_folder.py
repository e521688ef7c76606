"""The folder of a run: `output_dir/name`, with the resolved config in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from toolkit.config import save_config
from toolkit.distributed import agreed, barrier, rank
from toolkit.errors import UserError


def open_run_folder(config: Any) -> Path:
    """Create the run's folder, or find it; returns it. Nothing in it is changed yet: the run may still be refused. Collective.

    Raises:
        UserError: it cannot be written, or another node does not see it; on every rank.
    """
    folder = Path(config.run.output_dir) / config.run.name

    def create() -> None:
        if rank() != 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "no permission to write", str(folder))
        except OSError as error:
            raise UserError(
                f"run.output_dir {config.run.output_dir}: {folder} cannot be written ({error.strerror}): "
                "name a folder that you can write to"
            ) from None

    def find() -> None:
        if not folder.is_dir():
            raise UserError(
                f"run.output_dir {config.run.output_dir}: {folder} of the first node is not there on {socket.gethostname()}: "
                "name a folder on a file system that all nodes share"
            )

    agreed(create)
    barrier()
    agreed(find)
    return folder


def save_run_config(config: Any, folder: Path) -> None:
    """Write the resolved config into the run's folder, once nothing speaks against the run. On rank 0."""
    if rank() == 0:
        save_config(config, folder / "config.yaml")
