"""Finds, ranks and prunes a run's valid checkpoints. It reads files and manifests, but no tensors.

A checkpoint is valid only if its folder has its final name and a manifest, which is written last, that matches its files.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint.manifest import (
    REMOVING,
    REPLACED,
    Checkpoint,
    Unread,
    checkpoints_folder,
    list_checkpoints,
    list_leftovers,
    read_checkpoint,
    remove_folder,
    step_folder,
)
from toolkit.errors import UserError
from toolkit.files.durable import denials_named, fsync_path


def newest_valid(run_folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint of a run, and a sentence for each newer one that is not valid.

    A read error counts as not valid: an older checkpoint may lie on an intact part of a failing disk. One that may not be read
    is a `UserError`: it may be valid, and a run resumed from an older one would replace it.
    """
    refused: list[str] = []
    for _, folder in reversed(list_checkpoints(run_folder)):
        try:
            return read_checkpoint(folder), refused
        except ValueError as error:
            if isinstance(error, Unread) and error.is_denied:
                raise UserError(f"{checkpoints_folder(run_folder)}/{error}") from None
            refused.append(str(error))
    return None, refused


def find_checkpoint(run_folder: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that `checkpoint.resume` names, if any, and a sentence for each newer one that is not valid. For one process
    only, as it first restores what a crash left half replaced.

    A `UserError`: there are checkpoints but none is valid, or one may not be read; the named one is not valid or not the run's
    newest; `never` in a folder that holds checkpoints.
    """
    sentences, place = restore_replaced(run_folder), checkpoints_folder(run_folder)
    # auto: the newest valid checkpoint
    if resume == "auto":
        found, refused = newest_valid(run_folder)
        if found is None and refused:
            raise UserError(f"no checkpoint in {place} is valid ({'; '.join(refused)}): move them away, or take another run.name")
        return found, sentences + refused
    # never: only in a folder without checkpoints
    if resume == "never":
        if existing := list_checkpoints(run_folder):
            held = f"{place} holds checkpoints up to step {existing[-1][0]}"
            raise UserError(f"checkpoint.resume is never, but {held}: move them away, or take another run.name")
        return None, sentences
    # a named checkpoint: it must be valid, and the newest
    with denials_named("checkpoint.resume"):
        is_folder = Path(resume).is_dir()
    if not is_folder:
        example = step_folder(run_folder, 120)
        raise UserError(f"checkpoint.resume is {resume}, and there is no such folder: give auto, never or one as {example}")
    try:
        named = read_checkpoint(Path(resume))
    except ValueError as error:
        remedy = "" if isinstance(error, Unread) else ": give a whole checkpoint, or auto for the newest"
        raise UserError(f"checkpoint.resume is {resume}, but {error}{remedy}") from None
    if later := [other.name for step, other in list_checkpoints(run_folder) if step > named.step]:
        # Later ones would count as the newest, and the resumed run's saves would be pruned instead of them.
        raise UserError(f"checkpoint.resume is {resume}, but there are later ones beside it: move {', '.join(later)} away first")
    return named, sentences


def restore_replaced(run_folder: Path) -> list[str]:
    """Restore each `.old` whose replacement was never renamed into place, and remove each whose replacement is valid; returns a
    sentence for each that was restored, and for each that the file system refused to move or remove."""
    sentences = []
    for replaced in list_leftovers(run_folder):
        if replaced.suffix != REPLACED:
            continue
        folder = replaced.with_suffix("")
        try:
            if not os.path.lexists(folder) and replaced.is_dir():
                os.rename(replaced, folder)
                fsync_path(folder.parent)
                sentences.append(f"{replaced.name} is {folder.name} again: the save that should have replaced it never finished")
            else:
                if not replaced.is_file():
                    read_checkpoint(folder)
                remove_folder(replaced)
        except ValueError:
            continue  # its replacement is not valid
        except OSError as error:
            sentences.append(f"{replaced} could not be tidied up ({error.strerror}): a later save or resume tries again")
    return sentences


@dataclass(frozen=True)
class BestMetric:
    """What ranks checkpoints: a metric, its direction, and what it must be measured on."""

    name: str
    higher_is_better: bool
    measured_on: dict[str, Any]
    """What this run evaluates on: the sha256 of its `rows`, and its generation settings."""
    compared: tuple[str, ...]
    """Keys of `measured_on` that must be equal before two values of it may be compared."""

    def is_better(self, new: float, old: float | None) -> bool:
        """Whether `new` is better than `old`, the best so far; with None any number is. A NaN never is."""
        if old is None:
            return not math.isnan(new)
        return new > old if self.higher_is_better else new < old

    def changes(self, measured_on: dict[str, Any]) -> list[str]:
        """The compared keys in which `measured_on` differs from this run's; empty if values may be compared."""
        return [key for key in self.compared if measured_on.get(key) != self.measured_on[key]]


class Ranked(NamedTuple):
    """A complete checkpoint that was evaluated, and its value of the best metric."""

    checkpoint: Checkpoint
    value: float
    is_comparable: bool
    """Whether it was measured on what the run evaluates on now."""


def complete_checkpoints(run_folder: Path, last_step: int | None = None) -> tuple[list[Checkpoint], list[str]]:
    """Checkpoints up to `last_step` whose files are present in full size, oldest first; a sentence for each other."""
    whole, sentences = [], []
    for step, folder in list_checkpoints(run_folder):
        if last_step is None or step <= last_step:
            try:
                whole.append(read_checkpoint(folder, hashes=False))
            except ValueError as error:
                sentences.append(str(error))
    return whole, sentences


def rank_checkpoints(whole: list[Checkpoint], best_metric: BestMetric) -> list[Ranked]:
    """Those whose value of `best_metric` is a number, best first; of equal ones, the earlier first.

    Checkpoints measured as the run measures now come first. The others follow in groups that were measured alike, the group
    with the newest checkpoint first. `whole` is oldest first.
    """
    groups: dict[str, list[Ranked]] = {}
    for checkpoint in reversed(whole):
        measured_on, value = checkpoint.manifest["measured_on"], checkpoint.manifest["metrics"].get(best_metric.name, math.nan)
        if not math.isnan(value):
            alike = json.dumps([measured_on.get(key) for key in best_metric.compared], sort_keys=True)
            groups.setdefault(alike, []).append(Ranked(checkpoint, value, not best_metric.changes(measured_on)))
    best_first = sorted(groups.values(), key=lambda group: not group[0].is_comparable)  # stable: others by newest
    sign = -1 if best_metric.higher_is_better else 1
    by_value = (sorted(group, key=lambda ranked: (sign * ranked.value, ranked.checkpoint.step)) for group in best_first)
    return [ranked for group in by_value for ranked in group]


def best_value(run_folder: Path, best_metric: BestMetric, last_step: int) -> float | None:
    """The best value among the checkpoints up to `last_step` that may be compared with this run's; None: there is none."""
    ranked = rank_checkpoints(complete_checkpoints(run_folder, last_step)[0], best_metric)[:1]
    return ranked[0].value if ranked and ranked[0].is_comparable else None


def prune(run_folder: Path, keep_last: int, keep_best: int, best_metric: BestMetric, just_written: Path) -> list[str]:
    """Remove all checkpoints except the newest `keep_last` and the `keep_best` best by `best_metric`; remove what crashes left.

    `just_written` is always kept, and nothing is removed unless it is complete (presence and sizes; its hashes are new).
    Incomplete folders are left for the user to inspect. So are later ones: a resume skipped them, so they were not valid.
    No save may be running. Returns a sentence for each that could not be removed; the next call tries those again.
    """
    # Nothing goes before the new checkpoint is complete.
    try:
        step = read_checkpoint(just_written, hashes=False).step
    except ValueError as error:
        return [f"no checkpoint was removed, as the one just written is not whole: {error}"]
    sentences = restore_replaced(run_folder)
    # Choose what to keep.
    whole, _ = complete_checkpoints(run_folder, step)
    kept = {checkpoint.step for checkpoint in whole[-keep_last:]}  # the one just written is the newest of these
    kept |= {ranked.checkpoint.step for ranked in rank_checkpoints(whole, best_metric)[:keep_best]}
    going = [checkpoint.folder for checkpoint in whole if checkpoint.step not in kept]
    # An `.old` that is still there has a broken replacement. It must go before that, or the next restore would bring it back.
    leftovers = [path for path in list_leftovers(run_folder) if path.suffix != REPLACED or path.with_suffix("") in going]
    leftovers.sort(key=lambda path: path.suffix != REMOVING)  # the others are renamed to this before removal
    # Remove; a failure is only reported.
    for folder in [*leftovers, *going]:
        try:
            remove_folder(folder)
        except OSError as error:
            sentences.append(f"{folder} could not be removed ({error.strerror}): the next save tries again")
    return sentences
