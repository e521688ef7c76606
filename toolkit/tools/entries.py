"""What lies in a run's checkpoints folder, for people: checkpoints, valid or not, and leftovers. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folders import REMOVING, REPLACED, UNFINISHED, list_checkpoints, step_of_name
from toolkit.checkpoint.manifest import MANIFEST, Unread, check_files, read_manifest

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
    """True if it is named like a checkpoint; else it is a leftover."""
    valid: bool | None
    """None for a leftover."""
    note: str
    """Why it is not valid or not read, what kind of leftover it is, or another remark."""
    num_bytes: int
    """Size on the disk."""
    written_at: str | None
    """Modification time of its manifest, else of the folder, as local time in ISO 8601."""
    world_size: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Metrics evaluated at this step; None for a value that is not finite, which JSON cannot express."""
    measured_on: dict[str, Any] = field(default_factory=dict)
    """The sha256 of the rows that `metrics` were measured on, and the generation settings."""
    best_metric: str | None = None
    """The run's `eval.best_metric`."""
    best_value: float | None = None
    """Its best value up to this checkpoint."""
    unread: bool = False
    """The file system refuses to read it, so it may or may not be valid."""


def read_entries(run_folder: Path, check: Callable[[Path, dict[str, Any]], None] | None = None) -> list[Entry]:
    """The entries of all folders named like a checkpoint, oldest first, without those that a run removes meanwhile.

    Args:
        check: raises a `ValueError` if something else than presence and size of a file is wrong.
    """
    return [entry for _, path in list_checkpoints(run_folder) if (entry := _read_entry(path, check)) is not None]


def _read_entry(path: Path, check: Callable[[Path, dict[str, Any]], None] | None) -> Entry | None:
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, hashes=False)
        if check is not None:
            check(path, manifest)
    except ValueError as error:
        if not path.is_dir():
            return None
        problem = str(error).removeprefix(path.name).lstrip(" /")
        return replace(_entry(path, manifest, valid=False, note=problem), unread=isinstance(error, Unread))
    named = {MANIFEST, *(os.path.normpath(name) for name in manifest["files"])}
    extra = sorted(repr(name) for file in _files(path) if (name := str(file.relative_to(path))) not in named)
    note = f"also holds {', '.join(extra[:3])}{', …' * (len(extra) > 3)}, which nothing reads" if extra else ""
    return _entry(path, manifest, valid=True, note=note)


def read_leftover(path: Path) -> Entry:
    """The entry of a folder that a crash may leave beside checkpoints."""
    return _entry(path, {}, valid=None, note=_LEFTOVERS[path.suffix])


def _entry(path: Path, manifest: dict[str, Any], valid: bool | None, note: str) -> Entry:
    best_metric = manifest["identity"]["config"].get("eval.best_metric") if manifest else None
    return Entry(
        name=path.name,
        step=step_of_name(path.name.partition(".")[0]) or 0,
        is_checkpoint=valid is not None,
        valid=valid,
        note=note,
        num_bytes=sum(_num_bytes(file) for file in _files(path)),
        written_at=_written_at(path),
        world_size=manifest.get("world_size"),
        metrics={name: _finite(value) for name, value in manifest.get("metrics", {}).items()},
        measured_on=manifest.get("measured_on", {}) if manifest.get("metrics") else {},
        best_metric=best_metric if isinstance(best_metric, str) else None,
        best_value=_finite(manifest.get("state", {}).get("best_value")),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _files(path: Path) -> list[Path]:
    """Every file below a folder. `rglob` would stop at a folder that a run removes meanwhile."""
    return [Path(place, name) for place, _, names in os.walk(path) for name in names]


def _num_bytes(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # a run may be saving or pruning, or the file may not be accessed
        return 0


def _written_at(path: Path) -> str | None:
    for place in (path / MANIFEST, path):
        try:
            return datetime.fromtimestamp(place.stat().st_mtime).astimezone().isoformat(timespec="seconds")
        except OSError:
            continue
    return None
