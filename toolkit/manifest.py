"""Which checkpoints of a run exist, whole, and which are kept. Files only: no tensor is read here.

A checkpoint is a folder `checkpoints/step-00000120/`. It is written beside as `step-00000120.tmp/`, gets its
`manifest.json` (size and sha256 of every other file, and all a resume must compare) last, and is then renamed. So a folder
of that name with a manifest whose files match is whole, and nothing else is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.checkpoint_folders import (
    REMOVING,
    REPLACED,
    checkpoints_folder,
    fsync_folder,
    list_checkpoints,
    list_leftovers,
    put_in_place,
    remove_folder,
    step_folder,
)
from toolkit.errors import UserError
from toolkit.manifest_format import FORMAT_VERSION, MANIFEST, read_manifest, seal


def check_files(folder: Path, manifest: dict[str, Any], hashes: bool = True) -> None:
    """Compare size and sha256 of every file of a checkpoint with its manifest; without `hashes`, presence and size alone.

    Files that the manifest does not name are let be, as nothing reads them; but for shards and what every checkpoint has, which
    would be read unchecked.

    Raises:
        ValueError: naming the first file that is outside the folder, missing, unreadable, or has another size or hash.
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
    except OSError as error:  # a disk that fails is found here, and an older checkpoint may lie on a good part of it
        raise ValueError(f"{folder.name}/{name} cannot be read ({error.strerror})") from None


def newest_valid(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a sentence for each newer one that is not."""
    refused = []
    for _, folder in reversed(list_checkpoints(run_folder)):
        try:
            check_files(folder, read_manifest(folder))
        except ValueError as error:
            refused.append(str(error))
        else:
            return folder, refused
    return None, refused


def find_checkpoint(run_folder: Path, resume: str) -> tuple[Path | None, list[str]]:
    """What `checkpoint.resume` names, if anything, and a sentence for each newer checkpoint that is not valid.

    First puts back what a crash left half replaced, so only one process may call it.

    Raises:
        UserError: there are checkpoints but none is valid; a named one is not valid or the run has gone on from it; `never`
            in a folder that holds checkpoints.
    """
    told = restore_replaced(run_folder)
    if resume == "auto":
        found, refused = newest_valid(run_folder)
        if found is None and refused:
            raise UserError(
                f"no checkpoint in {checkpoints_folder(run_folder)} is valid ({'; '.join(refused)}): remove them to start "
                "from the first step, or take another run.name"
            )
        return found, told + refused
    if resume == "never":
        if existing := list_checkpoints(run_folder):
            raise UserError(
                f"checkpoint.resume is never, but {checkpoints_folder(run_folder)} holds checkpoints up to step "
                f"{existing[-1][0]}: take another run.name, or remove them"
            )
        return None, told
    folder = Path(resume)
    if not folder.is_dir():
        raise UserError(
            f"checkpoint.resume is {resume}, and there is no such folder: give auto, never or a checkpoint, as in "
            f"{step_folder(run_folder, 120)}"
        )
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except ValueError as error:
        raise UserError(f"checkpoint.resume is {resume}, but {error}: give a whole checkpoint, or auto for the newest") from None
    if later := [other.name for step, other in list_checkpoints(run_folder) if step > manifest["step"]]:
        # They would count as the newest, and what the resumed run saves would be pruned in their place.
        raise UserError(
            f"checkpoint.resume is {resume}, but {checkpoints_folder(run_folder)} has later ones: remove or move "
            f"{', '.join(later)} first"
        )
    return folder, told


def hash_file(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and hash of files, as they stand in a manifest; each is on the disk when this returns."""
    described = {}
    for name in names:
        path = folder / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        described[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return described


def hash_model_config(settings: dict[str, Any]) -> str:
    """sha256 of what a model's `config.json` says, but for the version that wrote it."""
    kept = {key: value for key, value in settings.items() if key != "transformers_version" and not key.startswith("_")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def commit(unfinished: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make it durable and rename the folder into place: from then on the checkpoint exists.

    Where a folder of that step exists, it is removed once the new one stands.
    """
    path = unfinished / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(seal({"format_version": FORMAT_VERSION, **manifest}), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for subfolder in {p.parent for p in unfinished.rglob("*")} | {unfinished}:
        fsync_folder(subfolder)
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
                fsync_folder(folder.parent)
                told.append(f"{replaced.name} is {folder.name} again: the save that was to replace it never came to its end")
            elif _is_valid(folder):
                remove_folder(replaced)
        except OSError as error:
            told.append(f"{replaced} could not be tidied up ({error.strerror}): a later save or resume tries again")
    return told


def prune(
    run_folder: Path, keep_last: int, keep_best: int, metric: str, higher_is_better: bool, just_written: Path
) -> tuple[list[Path], list[str]]:
    """Remove checkpoints but the newest `keep_last` and the `keep_best` best by `metric`, and what crashes left behind.

    `just_written` is always kept, and nothing is removed unless it is whole (presence and sizes; its hashes are as old as it
    is). Folders that are not whole are left for the user to look at, and so are later ones: a resume went back past them, so
    they were not valid. No save may be under way.

    Returns:
        The checkpoints removed, and a sentence for each that could not be; those are tried again by the next call.
    """
    try:
        step = _read_whole(just_written)["step"]
    except ValueError as error:
        return [], [f"no checkpoint was removed, as the one just written is not whole: {error}"]
    told = restore_replaced(run_folder)
    finished = [(s, folder, metrics) for s, folder, metrics in _finished_checkpoints(run_folder) if s <= step]
    kept = {folder.name for _, folder, _ in finished[-keep_last:]}  # the one just written is the newest of these
    kept |= {folder.name for folder in _best_first(finished, metric, higher_is_better)[:keep_best]}
    going = [folder for _, folder, _ in finished if folder.name not in kept]
    # An `.old` that restore_replaced left stands beside a broken replacement, and goes before that: else it would come back.
    leftovers = [path for path in list_leftovers(run_folder) if path.suffix != REPLACED or path.with_suffix("") in going]
    leftovers.sort(key=lambda path: path.suffix != REMOVING)  # the others take this name on their way out
    removed = []
    for folder in [*leftovers, *going]:
        try:
            remove_folder(folder)
        except OSError as error:
            told.append(f"{folder} could not be removed ({error.strerror}): the next save tries again")
        else:
            removed.append(folder)
    return [folder for folder in removed if folder in going], told


def best_checkpoint(run_folder: Path, metric: str, higher_is_better: bool) -> Path | None:
    """The kept checkpoint with the best `metric`; the earlier one of equals."""
    best = _best_first(_finished_checkpoints(run_folder), metric, higher_is_better)
    return best[0] if best else None


def _finished_checkpoints(run_folder: Path) -> list[tuple[int, Path, dict[str, float]]]:
    """`(step, folder, metrics)` of every checkpoint that is whole by presence and size of its files, oldest first."""
    finished = []
    for step, folder in list_checkpoints(run_folder):
        try:
            finished.append((step, folder, _read_whole(folder)["metrics"]))
        except ValueError:
            continue
    return finished


def _read_whole(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are there in full length."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    return manifest


def _is_valid(folder: Path) -> bool:
    try:
        check_files(folder, read_manifest(folder))
    except ValueError:
        return False
    return True


def _best_first(finished: list[tuple[int, Path, dict[str, float]]], metric: str, higher_is_better: bool) -> list[Path]:
    """Folders of those that were evaluated with `metric`; the earlier of equals first, as a tie is no gain; no NaN."""
    measured = [(metrics[metric], step, folder) for step, folder, metrics in finished if metric in metrics]
    ranked = sorted((-value if higher_is_better else value, step, folder) for value, step, folder in measured if value == value)
    return [folder for _, _, folder in ranked]


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
