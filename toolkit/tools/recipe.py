"""Which model a command line and its run YAMLs are about; the model chooses the recipe."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.flags import split_files_and_flags
from toolkit.config.paths import find_path


def find_model(argv: list[str]) -> str:
    """`model.name_or_path` of flags, else of run YAMLs. Empty if none says, which `load_config` reports better.

    Raises:
        UserError: the path is ambiguous.
    """
    files, flags = split_files_and_flags(argv)
    name = ""
    for file in files:
        written: Any = None
        with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            written = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["model"]["name_or_path"]
        if isinstance(written, str):
            name = find_path(written, Path(file), f"{file}: model.name_or_path")
    for flag, value in zip(flags, [*flags[1:], ""], strict=False):
        key, equals, rest = flag.partition("=")
        name = (rest if equals else value) if key == "--model.name_or_path" else name
    return name
