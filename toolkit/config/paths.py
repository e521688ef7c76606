"""Where the relative paths of a run YAML lead, and how a run writes its paths down so that they lead there from anywhere.

A path in a run YAML is one of the working directory or one beside the YAML, wherever there is something of that name; where there
is in both, nobody can know which one is meant. A path in a flag is one of the working directory. What a run writes
(`run.output_dir`, `data.cache_dir`) is of the working directory too, as nothing is there to be found.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.data import MixEntry
from toolkit.config.messages import Entry
from toolkit.errors import UserError

PATH_FIELDS = {
    "model": ("name_or_path", "init_from"),
    "adapter": ("name_or_path",),
    "data": ("source", "mix", "files", "eval_files", "chat_template", "folder"),
    "checkpoint": ("resume",),
}
"""Fields that name something to read, which may be a path; what is none, such as a hub id, leads nowhere and stays."""
_NO_PATHS = ("auto", "never")
"""Of `checkpoint.resume`."""


def find_paths(config: Any, entries: Mapping[str, Entry], flag_keys: Collection[str]) -> Any:
    """The config with every path from a run YAML as it leads there from the working directory.

    Args:
        entries: where the values of YAMLs stand.
        flag_keys: dotted keys given as flags.

    Raises:
        UserError: a relative path that leads to two places.
    """

    def find(key: str, value: str, is_pattern: bool) -> str:
        if key not in entries or key in flag_keys:
            return value
        where = f"{entries[key].path}, line {entries[key].line}: {key}"
        return find_path(value, entries[key].path, where, is_pattern=is_pattern)

    return _map_paths(config, find)


def find_path(value: str, yaml_path: Path, where: str, *, is_pattern: bool = False) -> str:
    """A path from a run YAML as it leads there from the working directory; what is nowhere is returned as it is.

    Args:
        where: begins the message.
        is_pattern: it may be a glob pattern.

    Raises:
        UserError: there is one in the working directory and another beside the YAML.
    """
    if not _is_relative(value):
        return value
    folder = os.path.realpath(yaml_path.parent)
    beside = os.path.relpath(os.path.join(glob.escape(folder) if is_pattern and glob.has_magic(value) else folder, value))
    here, there = _list_matches(value, is_pattern), _list_matches(beside, is_pattern)
    if here and there and here != there:
        raise UserError(
            f"{where} {value} is in the working directory ({here[0]}) and beside the run YAML ({there[0]}): write the whole "
            "path, or give it as a flag, which is one of the working directory"
        )
    return beside if there and not here else value


def write_paths(config: Any, folder: Path) -> Any:
    """The config with every relative path that leads somewhere as a YAML in `folder` would have it."""

    def write(key: str, value: str, is_pattern: bool) -> str:
        if not (_is_relative(value) and _list_matches(value, is_pattern)):
            return value
        parent, name = os.path.split(value)  # links on the way are followed; it may be one itself
        path = os.path.relpath(os.path.join(os.path.realpath(parent), name), os.path.realpath(folder))
        return path if path.startswith("..") else f"./{path}"

    return _map_paths(config, write)


def _map_paths(config: Any, change: Callable[[str, str, bool], str]) -> Any:
    """The config with `change(dotted key, value, is it a pattern)` in place of each value of `PATH_FIELDS`."""

    def changed(key: str, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [changed(key, name, item) for item in value]
        if isinstance(value, MixEntry):
            parts = {part: changed(key, part, getattr(value, part)) for part in ("source", "files")}
            return dataclasses.replace(value, **parts)
        # A source without a slash is the name of one, even where a folder is called so.
        is_path = isinstance(value, str) and (name != "source" or "/" in value)
        return change(key, value, name in ("files", "eval_files")) if is_path else value

    sections = {}
    for section, names in PATH_FIELDS.items():
        part: Any = getattr(config, section, None)
        values = {name: changed(f"{section}.{name}", name, getattr(part, name)) for name in names if hasattr(part, name)}
        if values:
            sections[section] = dataclasses.replace(part, **values)
    return dataclasses.replace(config, **sections)


def _is_relative(value: str) -> bool:
    return value not in _NO_PATHS and value.strip() != "" and not value.startswith(("/", "~"))


def _list_matches(value: str, is_pattern: bool) -> list[str]:
    """What a path leads to, links followed."""
    if os.path.exists(value):
        return [os.path.realpath(value)]
    return sorted(map(os.path.realpath, glob.glob(value, recursive=True))) if is_pattern and glob.has_magic(value) else []
