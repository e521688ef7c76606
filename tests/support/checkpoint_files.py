"""Checkpoints of two small files, for tests of what lies in a checkpoints folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from toolkit.checkpoint.find import (
    BestMetric,
    Ranked,
    complete_checkpoints,
    find_checkpoint,
    newest_valid,
    prune,
    rank_checkpoints,
)
from toolkit.checkpoint.manifest import MANIFEST, checkpoints_folder, commit, list_checkpoints, step_folder
from toolkit.files.durable import describe_files, seal

LOSS = BestMetric("loss", higher_is_better=False, measured_on={"rows": "a", "num_beams": 1}, compared=("rows",))


def make_checkpoint(run: Path, step: int, loss: float | None = None, measured_on: dict | None = None) -> Path:
    folder = step_folder(run, step)
    unfinished = write_unfinished(folder)
    commit(unfinished, folder, manifest_of(step, loss, unfinished, measured_on))
    return folder


def write_unfinished(folder: Path) -> Path:
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "state").mkdir(parents=True)
    (unfinished / "state" / ".metadata").write_bytes(folder.name.encode() * 10)
    (unfinished / "rng-00000.safetensors").write_bytes(b"state of chance")
    return unfinished


def manifest_of(step: int, loss: float | None, unfinished: Path, measured_on: dict | None = None) -> dict:
    return {
        "step": step,
        "world_size": 1,
        "identity": {"config": {}, "data_fingerprint": "d", "frozen_hashes": {}},
        "state": {"best_value": None},
        "metrics": {} if loss is None else {"loss": loss},
        "measured_on": measured_on or LOSS.measured_on,
        "files": describe_files(unfinished, ["state/.metadata", "rng-00000.safetensors"]),
    }


def change_manifest(folder: Path, change: Callable) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(seal(manifest)))


def prune_to(
    run: Path, just_written: Path, keep_last: int = 1, keep_best: int = 0, best_metric: BestMetric = LOSS
) -> tuple[list[Path], list[str]]:
    """The checkpoints that are gone, oldest first, and the sentences."""
    before = [folder for _, folder in list_checkpoints(run)]
    sentences = prune(run, keep_last, keep_best, best_metric, just_written)
    left = (*run.glob("checkpoints/*"),)
    return [folder for folder in before if not {folder, folder.with_suffix(".removing")}.intersection(left)], sentences


def newest_folder(run: Path) -> tuple[Path | None, list[str]]:
    newest, refused = newest_valid(run)
    return newest and newest.folder, refused


def found_folder(run: Path, resume: str) -> tuple[Path | None, list[str]]:
    found, sentences = find_checkpoint(run, resume)
    return found and found.folder, sentences


def ranked(run: Path, best_metric: BestMetric, last_step: int | None = None) -> list[Ranked]:
    return rank_checkpoints(complete_checkpoints(run, last_step)[0], best_metric)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in checkpoints_folder(run).iterdir())
