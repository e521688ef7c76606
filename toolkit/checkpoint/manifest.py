"""Reads, checks and writes a checkpoint's `manifest.json`; `commit` is where a checkpoint becomes valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint.folders import put_in_place, step_folder, step_of_name
from toolkit.files.durable import fsync_names, hash_file, save_json, seal
from toolkit.files.modes import WAY_IN
from toolkit.files.pointers import refuse_pointers

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
        """The step after which it was saved."""
        step: int = self.manifest["step"]
        return step

    @property
    def settings(self) -> dict[str, Any]:
        """`Identity.config` of its run."""
        settings: dict[str, Any] = self.manifest["identity"]["config"]
        return settings


def read_checkpoint(folder: Path, hashes: bool = True) -> Checkpoint:
    """A checkpoint whose manifest can be read and matches its files; else the errors of `read_manifest` and `check_files`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes)
    return Checkpoint(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        Unread: the file system refuses.
        ValueError: it is missing, is not JSON, has another format version, or is not what `commit` wrote.
    """
    # Read it.
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
        way_out = older if version < FORMAT_VERSION else "update the toolkit"
        raise ValueError(f"{folder.name} has checkpoint format {version}; this version reads {FORMAT_VERSION}: {way_out}")
    # What has its own hash is what `commit` wrote, so that the fields need no check of their own.
    if manifest.get("sha256") != seal(manifest)["sha256"]:
        raise ValueError(f"{where} does not have the sha256 that it names: its content changed")
    if step_of_name(folder.name) is not None and folder.name != step_folder(Path(), manifest["step"]).name:
        raise ValueError(f"{where} is of step {manifest['step']}, which is not what the folder is named after")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any], hashes: bool = True) -> None:
    """Compare every file of a checkpoint with its manifest: presence, size and, with `hashes`, sha256.

    A file that the manifest does not name is ignored, because nothing reads it. Shards, DCP's metadata and random states are
    exceptions: they would be read unchecked, so the manifest must name them.

    Raises:
        Unread: the file system refuses to read a file.
        ValueError: naming the first file that is outside the folder, missing, not named, or has another size or hash.
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
    """Write the manifest, fsync it and rename the folder into place: from then on the checkpoint is valid.

    An existing folder of the same step is removed once the new one is in place.
    """
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
