"""Resolves the relative paths of a run YAML, and writes a run's paths so that its saved config works from any directory.

A path in a run YAML is looked up in the working directory and beside the YAML; a match in both is ambiguous and refused.
A path in a flag is relative to the working directory. So are the folders that a run writes (`run.output_dir`,
`data.cache_dir`), which need not exist yet.
"""

import dataclasses
import glob
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.facts import facts_of
from toolkit.config.messages import Entry
from toolkit.errors import UserError

_NO_PATHS = ("auto", "never")
"""Values of `checkpoint.resume` that are not paths."""


def find_paths(config: Any, entries: Mapping[str, Entry], flag_keys: Collection[str]) -> Any:
    """The config with every path from a run YAML as `find_path` gives it. `entries` are the values of the YAMLs, `flag_keys` the
    dotted keys given as flags."""

    def find(key: str, value: str, is_pattern: bool) -> str:
        if key not in entries or key in flag_keys:
            return value
        where = f"{entries[key].path}, line {entries[key].line}: {key}"
        return find_path(value, entries[key].path, where, is_pattern=is_pattern)

    return _map_paths(config, find)


def find_path(value: str, yaml_path: Path, where: str, *, is_pattern: bool = False) -> str:
    """A path from a run YAML, made relative to the working directory; a path that matches nothing is returned as it is. One that
    matches in the working directory and beside the YAML is a `UserError` that begins with `where`. If it `is_pattern`, it may be
    a glob pattern."""
    if not _is_relative(value):
        return value
    folder = os.path.realpath(yaml_path.parent)
    beside = os.path.relpath(os.path.join(glob.escape(folder) if is_pattern and glob.has_magic(value) else folder, value))
    here, there = _list_matches(value, is_pattern), _list_matches(beside, is_pattern)
    if here and there and here != there:
        raise UserError(
            f"{where} {value} is in the working directory ({here[0]}) and beside the run YAML ({there[0]}): write the full "
            "path, or give it as a flag, which is relative to the working directory"
        )
    return beside if there and not here else value


def write_paths(config: Any, folder: Path) -> Any:
    """The config with every relative path that exists made relative to `folder`, for a YAML saved there."""

    def write(key: str, value: str, is_pattern: bool) -> str:
        if not (_is_relative(value) and _list_matches(value, is_pattern)):
            return value
        parent, name = os.path.split(value)  # resolve links in the parents, but keep the path itself, which may be a link
        path = os.path.relpath(os.path.join(os.path.realpath(parent), name), os.path.realpath(folder))
        return path if path.startswith("..") else f"./{path}"

    return _map_paths(config, write)


def replace_local_paths(config: Any, show: Callable[[str, str], str]) -> Any:
    """The config with `show(dotted key, path)` in place of each local path."""

    def replace(key: str, value: str, is_pattern: bool) -> str:
        is_local = value.startswith((".", "/", "~")) or bool(_is_relative(value) and _list_matches(value, is_pattern))
        return show(key, value) if is_local else value

    return _map_paths(config, replace)


def split_own_source(source: str) -> tuple[str, str] | None:
    """`folder/my_rows.py:load_rows` → its file and its function, which is empty if none is named; None for another source."""
    file, colon, function = source.rpartition(":")
    if source.endswith(".py"):
        return source, ""
    return (file, function) if colon and file.endswith(".py") else None


def _map_paths(config: Any, change: Callable[[str, str, bool], str]) -> Any:
    """The config with each path of a field that may hold one replaced by `change(dotted key, value, is_pattern)`."""

    def changed(key: str, kind: str | None, value: Any) -> Any:
        if isinstance(value, dict):
            return {of: changed(key, kind, paths) for of, paths in value.items()}
        if isinstance(value, list):
            return [changed(key, kind, item) for item in value]
        if kind == "entries":
            own = facts_of(type(value)).items()
            parts = {name: changed(key, facts.path, getattr(value, name)) for name, facts in own if facts.path}
            return dataclasses.replace(value, **parts)
        if not isinstance(value, str):
            return value
        if kind == "named" and (source := split_own_source(value)):
            return change(key, source[0], False) + value[len(source[0]) :]
        # What may be a name is one without a slash, even if a folder has the same name.
        return change(key, value, kind == "pattern") if kind != "named" or "/" in value else value

    sections: dict[str, dict[str, Any]] = {}
    for key, facts in facts_of(type(config)).items():
        if facts.path:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = changed(key, facts.path, getattr(getattr(config, section), name))
    changes = {section: dataclasses.replace(getattr(config, section), **values) for section, values in sections.items()}
    return dataclasses.replace(config, **changes)


def _is_relative(value: str) -> bool:
    return value not in _NO_PATHS and value.strip() != "" and not value.startswith(("/", "~"))


def _list_matches(value: str, is_pattern: bool) -> list[str]:
    """The real paths that a path or pattern matches."""
    if os.path.exists(value):
        return [os.path.realpath(value)]
    return sorted(map(os.path.realpath, glob.glob(value, recursive=True))) if is_pattern and glob.has_magic(value) else []
