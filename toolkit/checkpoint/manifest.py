"""Reads, checks and writes a checkpoint's `manifest.json`, and names, replaces and removes checkpoint folders so that a kill at
any moment loses no valid checkpoint; `commit` is where a checkpoint becomes valid.

    step-00000120/            a checkpoint, if its manifest matches its files
    step-00000120.tmp/        being written
    step-00000120.old/        the previous checkpoint of this step, kept until its replacement is in place
    step-00000120.removing/   being removed

A folder changes its state by one rename, and no file is removed from a folder that still has a checkpoint's name.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.files.durable import WAY_IN, denials_named, fsync_names, fsync_path, hash_file, refuse_pointers, save_json, seal

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
    """Rename a finished folder to its final name; what was there before is removed only afterwards. If a rename is refused, that
    is an `OSError`, and `folder` or its `.old` is what was there before."""
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
    """Remove a checkpoint or a leftover; rename it to `.removing` first, because a half removed folder may look complete. After
    an `OSError`, the next call for this step removes what is left."""
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


FORMAT_VERSION = 4
MANIFEST = "manifest.json"


class Unread(ValueError):
    """A file of a checkpoint could not be read, so its content is unknown and may be intact."""

    def __init__(self, name: str, error: OSError) -> None:
        self.is_denied = isinstance(error, PermissionError)
        super().__init__(f"{name} cannot be read ({error.strerror}){f': {WAY_IN}' * self.is_denied}")


class Checkpoint(NamedTuple):
    """A checkpoint's folder and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def settings(self) -> dict[str, Any]:
        """`Identity.config` of its run."""
        return dict(self.manifest["identity"]["config"])


def read_checkpoint(folder: Path, hashes: bool = True) -> Checkpoint:
    """A checkpoint whose manifest can be read and matches its files; else the errors of `read_manifest` and `check_files`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes)
    return Checkpoint(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; `Unread` if the file system refuses, a `ValueError` if it is missing, is not JSON, has
    another format version, or is not what `commit` wrote."""
    where = f"{folder.name}/{MANIFEST}"
    try:
        refuse_pointers([folder / MANIFEST])
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder.name} has no {MANIFEST}: it was never finished") from None
    except OSError as error:
        raise Unread(where, error) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read ({error})") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{where} is {manifest!r:.60}, not a mapping")
    if type(version := manifest.get("format_version")) is not int:
        raise ValueError(f"{folder.name} names no checkpoint format (format_version is {version!r:.60}): it is not one of ours")
    if version != FORMAT_VERSION:
        older = "export it with the version that wrote it, and give the export as model.init_from"
        remedy = older if version < FORMAT_VERSION else "update the toolkit"
        raise ValueError(f"{folder.name} has checkpoint format {version}; this version reads {FORMAT_VERSION}: {remedy}")
    # What has its own hash is what `commit` wrote, so that the fields need no check of their own.
    if manifest.get("sha256") != seal(manifest)["sha256"]:
        raise ValueError(f"{where} does not have the sha256 that it names: its content changed")
    if step_of_name(folder.name) is not None and folder.name != step_folder(Path(), manifest["step"]).name:
        raise ValueError(f"{where} is of step {manifest['step']}, which is not what the folder is named after")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any], hashes: bool = True) -> None:
    """Compare every file of a checkpoint with its manifest: presence, size and, with `hashes`, sha256.

    A file that the manifest does not name is ignored, because nothing reads it. Shards, DCP's metadata and random states are
    exceptions: they would be read unchecked, so the manifest must name them. A `ValueError` names the first file that is outside
    the folder, missing, not named, or has another size or hash; `Unread` one that the file system refuses to read.
    """
    size, num_files = manifest["world_size"], len(manifest["files"])
    if not 1 <= size <= num_files:
        raise ValueError(f"{folder.name}/{MANIFEST} has world_size {size}, but names {num_files} files")
    read = ["state/.metadata", *(f"rng-{rank:05d}.safetensors" for rank in range(size))]
    read += sorted(f"state/{path.name}" for path in (folder / "state").glob("__*.distcp"))
    if unnamed := [name for name in read if name not in manifest["files"]]:
        raise ValueError(f"{folder.name}/{MANIFEST} does not name {unnamed[0]}")
    for name, expected in manifest["files"].items():
        try:
            path = _inside(folder, name)
            if not path.exists():
                raise ValueError(f"{folder.name} lacks {name}")
            if not path.is_file():
                raise ValueError(f"{folder.name}/{name} is not a file")
            refuse_pointers([path])
            if (num_bytes := path.stat().st_size) != expected["bytes"]:
                raise ValueError(f"{folder.name}/{name} has {num_bytes} bytes instead of {expected['bytes']}")
            if hashes and hash_file(path) != expected["sha256"]:
                raise ValueError(f"{folder.name}/{name} does not have the sha256 of the manifest: its content changed")
        except OSError as error:
            raise Unread(f"{folder.name}/{name}", error) from None


def commit(unfinished: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, fsync it and rename the folder into place: from then on the checkpoint is valid."""
    save_json(unfinished / MANIFEST, seal({"format_version": FORMAT_VERSION, **manifest}))
    fsync_names(unfinished)
    put_in_place(unfinished, folder)


def _inside(folder: Path, name: str) -> Path:
    """Path of a file that a manifest names; refuses a name or a link that leads out of the folder."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute() or not name.isprintable():
        raise ValueError(f"{folder.name}/{MANIFEST} names {name!r}, which is outside the checkpoint or no name at all")
    for place in range(1, len(parts) + 1):
        if (part := folder.joinpath(*parts[:place])).is_symlink():
            link = part.relative_to(folder)
            raise ValueError(f"{folder.name}/{MANIFEST} names {name}, which is outside the checkpoint: {link} is a link")
    return folder / name
