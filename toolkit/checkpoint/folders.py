"""Names of checkpoint folders, and how one comes into place and goes, so that a kill at any moment loses none that stands.

    step-00000120/            a checkpoint, if its manifest and its files say so
    step-00000120.tmp/        being written
    step-00000120.old/        was in the place of the one above, until that stands
    step-00000120.removing/   on its way out

Every change of what a folder counts as is one rename; nothing is ever removed under a name that counts.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from toolkit.files.durable import fsync_path
from toolkit.files.modes import denials_named

UNFINISHED, REPLACED, REMOVING = ".tmp", ".old", ".removing"
_STEP_FOLDER = re.compile(r"step-([0-9]{8,})")


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` updates."""
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step that a folder of this name would be the checkpoint of; None where it is not named like one."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """`(step, folder)` of every folder named like a checkpoint, oldest first, whole or not.

    Raises:
        UserError: the folder of checkpoints may not be read.
    """
    found = []
    # `glob` would find none where it may not look, and the run would start anew.
    with denials_named("checkpoints"), suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(checkpoints_folder(run_folder)):
            if (step := step_of_name(entry.name)) is not None and entry.is_dir():
                found.append((step, Path(entry.path)))
    return sorted(found)


def list_leftovers(run_folder: Path) -> list[Path]:
    """Folders that a crash may leave beside checkpoints: `.tmp`, `.old` and `.removing`, by name."""
    suffixes = (UNFINISHED, REPLACED, REMOVING)
    found = (path for path in checkpoints_folder(run_folder).glob("step-*.*") if path.suffix in suffixes)
    return sorted(path for path in found if step_of_name(path.stem) is not None)


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename a finished folder to the name that counts; what stood there goes only when this one stands.

    Raises:
        OSError: a rename was refused; then `folder` or its `.old` is what was there before.
    """
    replaced = folder.with_name(folder.name + REPLACED)
    if os.path.lexists(folder):  # a broken checkpoint of this step, or one of a run that was resumed before it
        if os.path.lexists(replaced):
            remove_folder(replaced)
        os.rename(folder, replaced)
    os.rename(unfinished, folder)
    fsync_path(folder.parent)
    fsync_path(folder.parent.parent)  # which lists the folder of checkpoints, new at the first of them
    if os.path.lexists(replaced):
        with suppress(OSError):  # the new one stands, and the next prune tries again
            remove_folder(replaced)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint or a leftover; it is `.removing` first, as a half removed folder may look whole.

    Raises:
        OSError: it cannot be renamed or removed; what is left of it is then removed by the next call for this step.
    """
    removing = folder.with_name(f"{folder.name.partition('.')[0]}{REMOVING}")
    if folder != removing:
        if os.path.lexists(removing):
            _remove_tree(removing)
        os.rename(folder, removing)
        fsync_path(folder.parent)  # or a power cut could undo the rename and keep some of the removals
    _remove_tree(removing)


def _remove_tree(path: Path) -> None:
    if path.is_symlink():  # a checkpoint that was moved to another disk: the link is ours, what it points to is not
        path.unlink()
    else:
        shutil.rmtree(path)
