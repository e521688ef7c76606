"""Names of checkpoint folders, and how to replace and remove them so that a kill at any moment loses no valid checkpoint.

    step-00000120/            a checkpoint, if its manifest matches its files
    step-00000120.tmp/        being written
    step-00000120.old/        the previous checkpoint of this step, kept until its replacement is in place
    step-00000120.removing/   being removed

A folder changes its state by one rename, and no file is removed from a folder that still has a checkpoint's name.
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
    """The folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` updates."""
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step in a checkpoint folder's name; None if it is not such a name."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """`(step, folder)` of every folder named like a checkpoint, oldest first, valid or not; a `UserError` if they may not be
    read."""
    found = []
    # Not `glob`: without permission it would find no folder, and the run would start from scratch.
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
    """Rename a finished folder to its final name; what was there before is removed only afterwards.

    Raises:
        OSError: a rename was refused; then `folder` or its `.old` is what was there before.
    """
    replaced = folder.with_name(folder.name + REPLACED)
    if os.path.lexists(folder):  # a broken checkpoint of this step, or one later than the resume
        if os.path.lexists(replaced):
            remove_folder(replaced)
        os.rename(folder, replaced)
    os.rename(unfinished, folder)
    fsync_path(folder.parent)
    fsync_path(folder.parent.parent)  # the run folder: `checkpoints/` may be new in it
    if os.path.lexists(replaced):
        with suppress(OSError):  # the new one is in place, and the next prune tries again
            remove_folder(replaced)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint or a leftover; rename it to `.removing` first, because a half removed folder may look complete.

    Raises:
        OSError: it cannot be renamed or removed; the next call for this step removes what is left.
    """
    removing = folder.with_name(f"{folder.name.partition('.')[0]}{REMOVING}")
    if folder != removing:
        if os.path.lexists(removing):
            _remove_tree(removing)
        os.rename(folder, removing)
        fsync_path(folder.parent)  # otherwise a power cut could undo the rename but not all removals
    _remove_tree(removing)


def _remove_tree(path: Path) -> None:
    if path.is_symlink() or path.is_file():  # a checkpoint moved to another disk: remove the link, not its target
        path.unlink()
    else:
        shutil.rmtree(path)
