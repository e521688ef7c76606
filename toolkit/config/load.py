"""Reads the run YAML and its dotted flags into frozen dataclasses.

The accelerate YAML says *where* a run happens (processes, sharding, precision); the run YAML says *what* happens. Every field
is also a flag: `--optim.lr 1e-4`. Unknown keys and wrong types are refused, and the nearest existing key is suggested.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from toolkit.config.flags import join_lists, split_files_and_flags, unset_counterparts
from toolkit.config.messages import Entry, load_entries, sentence
from toolkit.config.paths import find_paths, write_paths
from toolkit.config.schema import RecipeConfig as RecipeConfig
from toolkit.config.validate import check_config
from toolkit.errors import UserError
from toolkit.files.durable import written_beside
from toolkit.optimizers import OptimizerSettings, with_defaults

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT")


def load_config(
    config_class: type[ConfigT],
    argv: list[str] | None = None,
    *,
    description: str | None = None,
    check: Callable[[Any], None] = check_config,
) -> ConfigT:
    """Read `--config FILE` and dotted flags into `config_class`. Flags win over files, wherever they stand. An unknown key (the
    nearest one is suggested), a wrong type, a missing or broken file, or an ambiguous path is a `UserError`.

    Args:
        description: for `--help`, with examples as the last paragraph.
        check: refuses fields that exclude or need each other.
    """
    argv = sys.argv[1:] if argv is None else argv
    # No abbreviations: a misspelt flag would match another one, and perhaps a third in the next version.
    about, _, examples = (description or "").strip().partition("\n\n")
    usage = examples.replace("\n", "\n       ") or None  # instead of a line for each field, all of which follow
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, usage=usage, description=about)
    parser.add_argument(
        "--config",
        action="config",
        help="Run YAML. Flags win over it. Repeat a list flag to add items. Relative paths in the YAML are looked up in the "
        "working directory and beside the YAML (a match in both is an error), those in flags in the working directory only.",
    )
    # Docstrings are shown by help only; to read them takes a third of the time.
    shows_help = any(word.startswith(("-h", "--help", "--print_config")) for word in argv)
    set_parsing_settings(docstring_parse_attribute_docstrings=shows_help)
    parser.add_class_arguments(config_class, None)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    # Sort the arguments; index the YAML values by key, for error messages and relative paths.
    files, flags = split_files_and_flags(argv)
    flags = join_lists(flags, config_class)
    entries: dict[str, Entry] = {}
    file_arguments = [f"--config={file}" for file in files]
    for file in files:
        entries |= load_entries(Path(file), config_class)

    # Parse the files alone first, so that an error is known to be theirs; then with the flags.
    try:
        if files:
            parser.parse_args(file_arguments)
    except ArgumentError as error:
        if "arguments are required" not in str(error):  # flags may give them
            raise UserError(sentence(str(error), config_class, [], entries)) from None
    try:
        namespace = parser.parse_args([*file_arguments, *unset_counterparts(flags, config_class), *flags])
        namespace.pop("config")
        config = parser.instantiate(namespace)
    except ArgumentError as error:
        raise UserError(sentence(str(error), config_class, flags, {})) from None

    # Build the dataclass, resolve its paths, check the fields against each other.
    built = _with_plain_numbers(config_class(**vars(config)))
    built = find_paths(built, entries, {flag.removeprefix("--").partition("=")[0] for flag in flags})
    check(built)
    return built


def dotted_keys(config: Any) -> dict[str, Any]:
    """A config as `{"optim.lr": 1e-3, …}`, in field order; values are plain values, lists and dicts."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        is_section = dataclasses.is_dataclass(getattr(config, name))
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if is_section else {name: value}
    return flat


def save_config(config: Any, path: Path) -> None:
    """Write the resolved config as YAML that `--config` reads again from any directory; relative paths start at its folder."""
    import yaml

    written = dataclasses.asdict(write_paths(config, path.parent))
    with written_beside(path) as beside:
        beside.write_text(yaml.safe_dump(written, sort_keys=False, allow_unicode=True))


def _with_plain_numbers(value: Any) -> Any:
    """Convert jsonargparse's restricted types to plain int and float: YAML cannot write subclasses of them. An optimizer's
    defaults are filled in."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = with_defaults(value) if isinstance(value, OptimizerSettings) else value
        plain = {f.name: _with_plain_numbers(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **plain)
    if isinstance(value, list):
        return [_with_plain_numbers(item) for item in value]
    for number_type in (int, float):
        if isinstance(value, number_type) and not isinstance(value, bool):
            return number_type(value)
    return value
