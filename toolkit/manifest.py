"""Which checkpoints of a run exist, whole. Files only: no tensor is read here.

A checkpoint is a folder `checkpoints/step-00000120/`. It is written beside as `step-00000120.tmp/`, gets its
`manifest.json` (size and sha256 of every other file, and all a resume must compare) last, and is then renamed. So a folder
of that name with a manifest whose files match is whole, and nothing else is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` updates."""
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """`(step, folder)` of every folder named like a checkpoint, oldest first, whole or not."""
    found = []
    for folder in checkpoints_folder(run_folder).glob("step-*"):
        if (match := _STEP_FOLDER.fullmatch(folder.name)) and folder.is_dir():
            found.append((int(match[1]), folder))
    return sorted(found)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: it is missing, is not JSON or has another format version; the sentence says which.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder.name} has no {MANIFEST}: it was never finished") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder.name}/{MANIFEST} cannot be read ({error})") from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder.name} has checkpoint format {manifest.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare size and sha256 of every file of a checkpoint with its manifest.

    Raises:
        ValueError: naming the first file that is missing, has another size or another hash.
    """
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder.name}/{MANIFEST} names {name}, which is outside the checkpoint")
        if not path.is_file():
            raise ValueError(f"{folder.name} lacks {name}")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{folder.name}/{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if hash_file(path) != expected["sha256"]:
            raise ValueError(f"{folder.name}/{name} does not have the sha256 of the manifest: its content changed")


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

    Raises:
        UserError: there are checkpoints but none is valid; a named one is not valid or the run has gone on from it; `never`
            in a folder that holds checkpoints.
    """
    if resume == "auto":
        found, refused = newest_valid(run_folder)
        if found is None and refused:
            raise UserError(
                f"no checkpoint in {checkpoints_folder(run_folder)} is valid ({'; '.join(refused)}): remove them to start "
                "from the first step, or take another run.name"
            )
        return found, refused
    if resume == "never":
        if existing := list_checkpoints(run_folder):
            raise UserError(
                f"checkpoint.resume is never, but {checkpoints_folder(run_folder)} holds checkpoints up to step "
                f"{existing[-1][0]}: take another run.name, or remove them"
            )
        return None, []
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
    return folder, []


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
    """Write the manifest, make it durable and rename the folder into place: from then on the checkpoint exists."""
    path = unfinished / MANIFEST
    with path.open("w") as file:
        json.dump({"format_version": FORMAT_VERSION, **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for subfolder in {p.parent for p in unfinished.rglob("*")} | {unfinished}:
        _fsync_folder(subfolder)
    if folder.exists():  # a broken checkpoint of this step, or one of a run that was resumed before it
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _fsync_folder(folder.parent)


def prune(run_folder: Path, keep_last: int, keep_best: int, metric: str, higher_is_better: bool) -> list[Path]:
    """Remove checkpoints but the newest `keep_last` and the `keep_best` best by `metric`; returns what was removed.

    The one written last is always kept, which is not the newest by step where a resume has gone back past damaged ones.
    Folders without a readable manifest are left for the user to look at.
    """
    finished = _finished_checkpoints(run_folder)
    kept = {folder for _, folder, _ in finished[-keep_last:]}
    kept.update(sorted((folder for _, folder, _ in finished), key=_written_at)[-1:])
    kept.update(_best_first(finished, metric, higher_is_better)[:keep_best])
    removed = [folder for _, folder, _ in finished if folder not in kept]
    for folder in removed:
        (folder / MANIFEST).unlink()  # first, so that a half removed folder is no checkpoint
        shutil.rmtree(folder)
    return removed


def best_checkpoint(run_folder: Path, metric: str, higher_is_better: bool) -> Path | None:
    """The kept checkpoint with the best `metric`; the earlier one of equals."""
    best = _best_first(_finished_checkpoints(run_folder), metric, higher_is_better)
    return best[0] if best else None


def _finished_checkpoints(run_folder: Path) -> list[tuple[int, Path, dict[str, float]]]:
    """`(step, folder, metrics)` of every checkpoint with a manifest, oldest first."""
    finished = []
    for step, folder in list_checkpoints(run_folder):
        try:
            finished.append((step, folder, read_manifest(folder).get("metrics", {})))
        except ValueError:
            continue
    return finished


def _written_at(folder: Path) -> tuple[int, str]:
    """When a checkpoint was committed, in ns; by step within one tick of the file system's clock."""
    return (folder / MANIFEST).stat().st_mtime_ns, folder.name


def _best_first(finished: list[tuple[int, Path, dict[str, float]]], metric: str, higher_is_better: bool) -> list[Path]:
    """Folders of those that were evaluated with `metric`; the earlier of equals first, as a tie is no gain; no NaN."""
    measured = [(metrics[metric], step, folder) for step, folder, metrics in finished if metric in metrics]
    ranked = sorted((-value if higher_is_better else value, step, folder) for value, step, folder in measured if value == value)
    return [folder for _, _, folder in ranked]


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
