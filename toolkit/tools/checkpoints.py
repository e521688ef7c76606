"""`python -m toolkit checkpoints`: what lies in a run's checkpoints folder, checked. Imports no torch."""

import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.manifest import (
    MANIFEST,
    REMOVING,
    REPLACED,
    UNFINISHED,
    Unread,
    check_files,
    checkpoints_folder,
    list_checkpoints,
    list_leftovers,
    read_manifest,
    step_of_name,
)
from toolkit.errors import UserError, align, one_line

_METRICS = ("loss", "bits_per_byte", "token_accuracy", "rouge1", "rougeL", "exact_match")
_LEFTOVERS = {
    UNFINISHED: "unfinished: a save under way, or one that a crash ended; the next save removes it",
    REPLACED: "replaced by another of that step; a resume puts it back where that one is missing",
    REMOVING: "half removed; the next save removes the rest",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder in a run's checkpoints folder."""

    name: str
    step: int
    is_checkpoint: bool
    """Whether it is named like a checkpoint, not a leftover."""
    valid: bool | None
    """None for a leftover."""
    note: str
    """Why it is not valid or not read, what kind of leftover it is, or another remark."""
    num_bytes: int
    written_at: str | None
    """Modification time of its manifest, else of the folder, as local time in ISO 8601."""
    world_size: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Metrics evaluated at this step; None for a value that is not finite, which JSON cannot express."""
    measured_on: dict[str, Any] = field(default_factory=dict)
    """The sha256 of the rows that `metrics` were measured on, and the generation settings."""
    best_metric: str | None = None
    best_value: float | None = None
    unread: bool = False
    """The file system refuses to read it, so it may or may not be valid."""


def show_checkpoints(run_folder: Path, verify: bool, as_json: bool) -> bool:
    """Print a table or JSON of a run's checkpoints and leftovers; returns whether every folder named like a checkpoint is valid.
    With `verify`, hash every file. No such run folder, or one without a checkpoint, is a `UserError`."""
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        what = "has no checkpoints folder" if run_folder.is_dir() else "is not a folder"
        raise UserError(f"{run_folder} {what}: give the folder of a run, as in runs/t5_functions")
    leftovers = [_entry(path, {}, valid=None, note=_LEFTOVERS[path.suffix]) for path in list_leftovers(run_folder)]
    checked = read_entries(run_folder, hashes=verify)
    if not checked:
        beside = f", only {', '.join(entry.name for entry in leftovers)}" if leftovers else ""
        raise UserError(f"{folder} holds no checkpoint{beside}: let the run reach its first one")
    checked = [_note_other_rows(entry, [other for other in checked if other.metrics][-1:]) for entry in checked]
    entries = sorted([*checked, *leftovers], key=lambda entry: (entry.step, entry.name))
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1, allow_nan=False))
    else:
        print(_format(entries))
        if not verify:
            print("Presence and size of every file were compared with the manifest; --verify hashes them too.")
    return all(entry.valid for entry in checked)


def read_entries(run_folder: Path, *, hashes: bool = False) -> list[Entry]:
    """The entries of all folders named like a checkpoint, oldest first, without those that a run removes meanwhile."""
    listed, is_shown = list_checkpoints(run_folder), hashes and sys.stderr.isatty()
    bar = tqdm(listed, desc="hashing", unit=" checkpoints", leave=False, disable=not is_shown)
    return [entry for _, path in bar if (entry := _read_entry(path, hashes)) is not None]


def _read_entry(path: Path, hashes: bool) -> Entry | None:
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, hashes)
    except ValueError as error:
        if not path.is_dir():
            return None
        problem = str(error).removeprefix(path.name).lstrip(" /")
        return replace(_entry(path, manifest, valid=False, note=problem), unread=isinstance(error, Unread))
    named = {MANIFEST, *(os.path.normpath(name) for name in manifest["files"])}
    extra = sorted(repr(name) for name in _sizes(path) if name not in named)
    note = f"also holds {', '.join(extra[:3])}{', …' * (len(extra) > 3)}, which nothing reads" if extra else ""
    return _entry(path, manifest, valid=True, note=note)


def _entry(path: Path, manifest: dict[str, Any], valid: bool | None, note: str) -> Entry:
    written_at = None
    for place in (path, path / MANIFEST):  # the manifest's time counts, where it is there
        with suppress(OSError):
            written_at = datetime.fromtimestamp(place.stat().st_mtime).astimezone().isoformat(timespec="seconds")
    best_metric = manifest["identity"]["config"].get("eval.best_metric") if manifest else None
    return Entry(
        name=path.name,
        step=step_of_name(path.name.partition(".")[0]) or 0,
        is_checkpoint=valid is not None,
        valid=valid,
        note=note,
        num_bytes=sum(_sizes(path).values()),
        written_at=written_at,
        world_size=manifest.get("world_size"),
        metrics={name: _finite(value) for name, value in manifest.get("metrics", {}).items()},
        measured_on=manifest.get("measured_on", {}) if manifest.get("metrics") else {},
        best_metric=best_metric if isinstance(best_metric, str) else None,
        best_value=_finite(manifest.get("state", {}).get("best_value")),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by name. `rglob` would stop at a folder that a run removes meanwhile."""
    sizes = {}
    for file in (Path(place, name) for place, _, names in os.walk(path) for name in names):
        with suppress(OSError):  # a run may be saving or pruning
            sizes[str(file.relative_to(path))] = file.lstat().st_size
    return sizes


def _note_other_rows(entry: Entry, newest: list[Entry]) -> Entry:
    """The entry, with a note if its metrics are not comparable with those of the newest checkpoint that has any."""
    if not entry.metrics or not newest or entry.measured_on == newest[0].measured_on:
        return entry
    is_of_rows = entry.measured_on.get("rows") != newest[0].measured_on.get("rows")
    what = "metrics are of other rows" if is_of_rows else "texts were generated or scored in another way"
    return replace(entry, note=f"{entry.note}; " * bool(entry.note) + f"{what} than {newest[0].name}'s")


def _format(entries: list[Entry]) -> str:
    """Format entries as aligned text, one row each, without metrics that no checkpoint has."""
    wanted = dict.fromkeys([*_METRICS, *(entry.best_metric for entry in entries if entry.best_metric)])
    metrics = [name for name in wanted if any(name in entry.metrics for entry in entries)]
    table = [["", "MiB", "written", "processes", *metrics, ""]]
    for entry in entries:
        state = "NOT READ" if entry.unread else {True: "valid", False: "NOT VALID", None: "leftover"}[entry.valid]
        table.append(
            [
                entry.name,
                f"{entry.num_bytes / 2**20:,.1f}",
                entry.written_at[:16].replace("T", " ") if entry.written_at else "–",
                "–" if entry.world_size is None else str(entry.world_size),
                *("–" if (value := entry.metrics.get(name)) is None else f"{value:.2f}" for name in metrics),
                f"{state}: {entry.note}" if entry.note else state,
            ]
        )
    return "\n".join(align([list(map(one_line, row)) for row in table], left=(0, len(table[0]) - 1)))
