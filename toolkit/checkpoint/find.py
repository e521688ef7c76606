"""Which checkpoints of a run exist, whole. Files only: no tensor is read here.

A checkpoint is a folder `checkpoints/step-00000120/`. It is written beside as `step-00000120.tmp/`, gets its
`manifest.json` (size and sha256 of every other file, and all a resume must compare) last, and is then renamed. So a folder
of that name with a manifest whose files match is whole, and nothing else is.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folders import (
    REPLACED,
    checkpoints_folder,
    list_checkpoints,
    list_leftovers,
    put_in_place,
    remove_folder,
    step_folder,
)
from toolkit.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Unread, read_manifest, seal
from toolkit.errors import UserError
from toolkit.files.durable import fsync_names, fsync_path, hash_file, save_json
from toolkit.files.modes import denials_named


def check_files(folder: Path, manifest: dict[str, Any], hashes: bool = True) -> None:
    """Compare size and sha256 of every file of a checkpoint with its manifest; without `hashes`, presence and size alone.

    Files that the manifest does not name are let be, as nothing reads them; but for shards and what every checkpoint has, which
    would be read unchecked.

    Raises:
        Unread: the file system refuses to read a file.
        ValueError: naming the first file that is outside the folder, missing, or has another size or hash.
    """
    if not 1 <= manifest["world_size"] <= len(manifest["files"]):
        raise ValueError(
            f"{folder.name}/{MANIFEST} has world_size {manifest['world_size']}, but names {len(manifest['files'])} files"
        )
    read = ["state/.metadata", *(f"rng-{rank:05d}.safetensors" for rank in range(manifest["world_size"]))]
    read += sorted(f"state/{path.name}" for path in (folder / "state").glob("__*.distcp"))
    if unnamed := [name for name in read if name not in manifest["files"]]:
        raise ValueError(f"{folder.name}/{MANIFEST} does not name {unnamed[0]}")
    for name, expected in manifest["files"].items():
        check_file(folder, name, expected, hashes)


def check_file(folder: Path, name: str, expected: dict[str, Any], hashes: bool) -> None:
    """Compare one file with what the manifest says of it.

    Raises:
        ValueError: as `check_files`.
    """
    try:
        path = _inside(folder, name)
        if not path.exists():
            raise ValueError(f"{folder.name} lacks {name}")
        if not path.is_file():
            raise ValueError(f"{folder.name}/{name} is not a file")
        if (num_bytes := path.stat().st_size) != expected["bytes"]:
            raise ValueError(f"{folder.name}/{name} has {num_bytes} bytes instead of {expected['bytes']}")
        if hashes and hash_file(path) != expected["sha256"]:
            raise ValueError(f"{folder.name}/{name} does not have the sha256 of the manifest: its content changed")
    except OSError as error:
        raise Unread(f"{folder.name}/{name}", error) from None


def newest_valid(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a sentence for each newer one that is not.

    A disk that fails is among the reasons, as an older checkpoint may lie on a good part of it.

    Raises:
        UserError: a newer one may not be read: it may be whole, and a run that went on from an older one would replace it.
    """
    refused = []
    for _, folder in reversed(list_checkpoints(run_folder)):
        try:
            check_files(folder, read_manifest(folder))
        except ValueError as error:
            if isinstance(error, Unread) and error.is_denied:
                raise UserError(f"{checkpoints_folder(run_folder)}/{error}") from None
            refused.append(str(error))
        else:
            return folder, refused
    return None, refused


def find_checkpoint(run_folder: Path, resume: str) -> tuple[Path | None, list[str]]:
    """What `checkpoint.resume` names, if anything, and a sentence for each newer checkpoint that is not valid.

    First puts back what a crash left half replaced, so only one process may call it.

    Raises:
        UserError: there are checkpoints but none is valid, or one may not be read; a named one is not valid or the run has gone
            on from it; `never` in a folder that holds checkpoints.
    """
    told = restore_replaced(run_folder)
    if resume == "auto":
        found, refused = newest_valid(run_folder)
        if found is None and refused:
            raise UserError(
                f"no checkpoint in {checkpoints_folder(run_folder)} is valid ({'; '.join(refused)}): move them away to "
                "start from the first step, or take another run.name"
            )
        return found, told + refused
    if resume == "never":
        if existing := list_checkpoints(run_folder):
            raise UserError(
                f"checkpoint.resume is never, but {checkpoints_folder(run_folder)} holds checkpoints up to step "
                f"{existing[-1][0]}: take another run.name, or move them away"
            )
        return None, told
    folder = Path(resume)
    if not _is_folder(folder):
        raise UserError(
            f"checkpoint.resume is {resume}, and there is no such folder: give auto, never or a checkpoint, as in "
            f"{step_folder(run_folder, 120)}"
        )
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except Unread as error:
        raise UserError(f"checkpoint.resume is {resume}, but {error}") from None
    except ValueError as error:
        raise UserError(f"checkpoint.resume is {resume}, but {error}: give a whole checkpoint, or auto for the newest") from None
    if later := [other.name for step, other in list_checkpoints(run_folder) if step > manifest["step"]]:
        # They would count as the newest, and what the resumed run saves would be pruned in their place.
        raise UserError(
            f"checkpoint.resume is {resume}, but {checkpoints_folder(run_folder)} has later ones: move "
            f"{', '.join(later)} away first"
        )
    return folder, told


def hash_model_config(settings: dict[str, Any]) -> str:
    """sha256 of what a model's `config.json` says, but for the version that wrote it."""
    kept = {key: value for key, value in settings.items() if key != "transformers_version" and not key.startswith("_")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def commit(unfinished: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make it durable and rename the folder into place: from then on the checkpoint exists.

    Where a folder of that step exists, it is removed once the new one stands.
    """
    save_json(unfinished / MANIFEST, seal({"format_version": FORMAT_VERSION, **manifest}))
    fsync_names(unfinished)
    put_in_place(unfinished, folder)


def restore_replaced(run_folder: Path) -> list[str]:
    """Put back each `.old` whose replacement never came into place, and remove those whose replacement is valid.

    Returns:
        A sentence for each that was put back, and for each that the file system refused to move or remove.
    """
    told = []
    for replaced in list_leftovers(run_folder):
        if replaced.suffix != REPLACED:
            continue
        folder = replaced.with_suffix("")
        try:
            if not os.path.lexists(folder):
                os.rename(replaced, folder)
                fsync_path(folder.parent)
                told.append(f"{replaced.name} is {folder.name} again: the save that was to replace it never came to its end")
            elif _is_valid(folder):
                remove_folder(replaced)
        except OSError as error:
            told.append(f"{replaced} could not be tidied up ({error.strerror}): a later save or resume tries again")
    return told


def _is_folder(path: Path) -> bool:
    with denials_named("checkpoint.resume"):
        return path.is_dir()


def _is_valid(folder: Path) -> bool:
    try:
        check_files(folder, read_manifest(folder))
    except ValueError:
        return False
    return True


def _inside(folder: Path, name: str) -> Path:
    """Path of a file that a manifest names, which may not lead out of the folder, by links neither."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute() or not name.isprintable():
        raise ValueError(f"{folder.name}/{MANIFEST} names {name!r}, which is outside the checkpoint or no name at all")
    for place in range(1, len(parts) + 1):
        if (part := folder.joinpath(*parts[:place])).is_symlink():
            link = part.relative_to(folder)
            raise ValueError(f"{folder.name}/{MANIFEST} names {name}, which is outside the checkpoint: {link} is a link")
    return folder / name
