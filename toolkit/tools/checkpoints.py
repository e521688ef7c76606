"""`python -m toolkit checkpoints`: lists a run's checkpoints and checks that each is complete. Imports no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.folders import checkpoints_folder, list_leftovers
from toolkit.checkpoint.manifest import check_file
from toolkit.errors import UserError, align, one_line
from toolkit.tools.entries import Entry, read_entries, read_leftover

_METRICS = ("loss", "bits_per_byte", "token_accuracy", "rouge1", "rougeL", "exact_match")
_LARGE_BYTES = 2**28  # takes about a second to hash


def show_checkpoints(run_folder: Path, verify: bool, as_json: bool) -> bool:
    """Print a table or JSON of a run's checkpoints and leftovers. With `verify`, hash every file.

    Returns:
        Whether every folder named like a checkpoint is valid.

    Raises:
        UserError: there is no such run folder, or it has no checkpoint.
    """
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        what = "has no checkpoints folder" if run_folder.is_dir() else "is not a folder"
        raise UserError(f"{run_folder} {what}: give the folder of a run, as in runs/t5_docstrings")
    leftovers = [read_leftover(path) for path in list_leftovers(run_folder)]
    checked = read_entries(run_folder, _hash_files if verify else None)
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


def _note_other_rows(entry: Entry, newest: list[Entry]) -> Entry:
    """The entry, with a note if its metrics are not comparable with those of the newest checkpoint that has any."""
    if not entry.metrics or not newest or entry.measured_on == newest[0].measured_on:
        return entry
    is_of_rows = entry.measured_on.get("rows") != newest[0].measured_on.get("rows")
    what = "metrics are of other rows" if is_of_rows else "texts were generated or scored in another way"
    return replace(entry, note=f"{entry.note}; " * bool(entry.note) + f"{what} than {newest[0].name}'s")


def _hash_files(path: Path, manifest: dict[str, Any]) -> None:
    """Check every file by its hash, with a progress line on a terminal if that takes long."""
    total = sum(about["bytes"] for about in manifest["files"].values())
    is_shown = total >= _LARGE_BYTES and sys.stderr.isatty()
    with tqdm(desc=f"hashing {path.name}", total=total, unit="B", unit_scale=True, leave=False, disable=not is_shown) as bar:
        for name, about in manifest["files"].items():
            check_file(path, name, about, hashes=True)
            bar.update(about["bytes"])


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
