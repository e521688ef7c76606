"""Which checkpoints of a run exist, whole. Files only: no tensor is read here.

A checkpoint is a folder `checkpoints/step-00000120/`. It is written beside as `step-00000120.tmp/`, gets its
`manifest.json` (size and sha256 of every other file, and all a resume must compare) last, and is then renamed. So a folder
of that name with a manifest whose files match is whole, and nothing else is.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint.folders import (
    REMOVING,
    REPLACED,
    checkpoints_folder,
    list_checkpoints,
    list_leftovers,
    remove_folder,
    step_folder,
)
from toolkit.checkpoint.manifest import Unread, check_files, read_manifest
from toolkit.errors import UserError
from toolkit.files.durable import fsync_path
from toolkit.files.modes import denials_named


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


@dataclass(frozen=True)
class Goal:
    """What makes one checkpoint better than another."""

    metric: str
    higher_is_better: bool
    measured_on: dict[str, Any]
    """What this run evaluates on: the sha256 of its `rows`, and the settings of its generated texts."""
    compared: tuple[str, ...]
    """Keys of `measured_on` that must be equal for two figures of `metric` to be compared."""

    def is_better(self, new: float, old: float | None) -> bool:
        """Whether `new` gains on `old`, the best so far, if there is one; a NaN never does."""
        if old is None:
            return not math.isnan(new)
        return new > old if self.higher_is_better else new < old

    def changes(self, measured_on: dict[str, Any]) -> list[str]:
        """Keys that forbid a comparison of figures measured on those with this run's."""
        return [key for key in self.compared if measured_on.get(key) != self.measured_on[key]]


class Ranked(NamedTuple):
    """A whole checkpoint that was evaluated."""

    folder: Path
    step: int
    value: float
    """Of the goal's metric."""
    is_comparable: bool
    """Measured on what the run measures on now."""


def rank_checkpoints(run_folder: Path, goal: Goal, last_step: int | None = None) -> list[Ranked]:
    """Checkpoints up to `last_step` that have the goal's metric, and no NaN, best first; of equals the earlier: a tie is no gain.

    Whole by presence and size of their files. Those measured as the run measures now come first; the others after them, in groups
    that were measured alike, the group with the newest checkpoint first.
    """
    whole = _whole_manifests(run_folder)
    return _rank([(folder, manifest) for folder, manifest in whole if last_step is None or manifest["step"] <= last_step], goal)


def prune(run_folder: Path, keep_last: int, keep_best: int, goal: Goal, just_written: Path) -> tuple[list[Path], list[str]]:
    """Remove checkpoints but the newest `keep_last` and the `keep_best` best by `goal`, and what crashes left behind.

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
    whole = [(folder, manifest) for folder, manifest in _whole_manifests(run_folder) if manifest["step"] <= step]
    kept = {folder.name for folder, _ in whole[-keep_last:]}  # the one just written is the newest of these
    kept |= {ranked.folder.name for ranked in _rank(whole, goal)[:keep_best]}
    going = [folder for folder, _ in whole if folder.name not in kept]
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


def _rank(whole: list[tuple[Path, dict[str, Any]]], goal: Goal) -> list[Ranked]:
    groups: dict[str, list[Ranked]] = {}
    for folder, manifest in reversed(whole):
        measured_on, value = manifest["measured_on"], manifest["metrics"].get(goal.metric, math.nan)
        if not math.isnan(value):
            alike = json.dumps([measured_on.get(key) for key in goal.compared], sort_keys=True)
            ranked = Ranked(folder, manifest["step"], value, not goal.changes(measured_on))
            groups.setdefault(alike, []).append(ranked)
    best_first = sorted(groups.values(), key=lambda group: not group[0].is_comparable)  # stable: else the newest group first
    sign = -1 if goal.higher_is_better else 1
    return [ranked for group in best_first for ranked in sorted(group, key=lambda ranked: (sign * ranked.value, ranked.step))]


def _whole_manifests(run_folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """`(folder, manifest)` of every checkpoint that is whole by presence and size of its files, oldest first."""
    whole = []
    for _, folder in list_checkpoints(run_folder):
        try:
            whole.append((folder, _read_whole(folder)))
        except ValueError:
            continue
    return whole


def _read_whole(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are there in full length."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    return manifest
