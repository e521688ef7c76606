"""Reads the run YAML and its dotted flags into frozen dataclasses.

The accelerate YAML says *where* a run happens (processes, sharding, precision); the run YAML says *what* happens. Every field
is also a flag: `--optim.lr 1e-4`. Unknown keys and wrong types are refused, and the nearest existing key is suggested.
What jsonargparse lacks is here: flags win over files, and repeated flags of lists add up.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from toolkit.config.facts import exclusive_pairs, facts_of
from toolkit.config.messages import Entry, given_flags, known_keys, load_entries, sentence
from toolkit.config.paths import find_paths, write_paths
from toolkit.config.schema import RecipeConfig as RecipeConfig
from toolkit.config.validate import check_config
from toolkit.errors import UserError
from toolkit.files.durable import written_beside
from toolkit.optimizers import OptimizerSettings, with_defaults

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

    # Sort the arguments; index the YAML values by key, for error messages and relative paths.
    files, flags = split_files_and_flags(argv)
    flags = _join_lists(flags, config_class)
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
        namespace = parser.parse_args([*file_arguments, *_unset_counterparts(flags, config_class), *flags])
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


def _unset_counterparts(flags: list[str], config_class: type) -> list[str]:
    """Flags that unset the other of two keys, of which a run has one: the one given as a flag wins over the YAML's."""
    facts, values = facts_of(config_class), dict(reversed(given_flags(flags)))
    return [
        f"--{other}={json.dumps(facts[other].default)}"
        for pair in exclusive_pairs(config_class)
        for other in pair
        if other not in values and any(_load(values.get(key, "")) for key in pair)
    ]


def split_files_and_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and all other arguments. jsonargparse would let a file win over flags that stand before it."""
    splitter = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    splitter.add_argument("--config", action="append", default=[])
    try:
        known, flags = splitter.parse_known_args(argv)
    except argparse.ArgumentError:
        raise UserError("--config has no value: give one, as in --config VALUE") from None
    return known.config, flags


def _join_lists(flags: list[str], config_class: type) -> list[str]:
    """Make `--data.files a --data.files b` one list, for which jsonargparse has flags that end in `+`: else it keeps the last,
    and refuses an item by itself in a field of lists. null and [] drop the items before."""
    hints = {key: (hint, *get_args(hint)) for key, hint in known_keys(config_class)[0].items()}
    joined: list[str] = []
    given: set[str] = set()
    rest = flags[::-1]
    while rest:
        flag = rest.pop()
        key, equals, value = flag.removeprefix("--").partition("=")
        is_list = flag.startswith("--") and any(get_origin(option) is list for option in hints.get(key, ()))
        if not is_list or not (equals or (rest and not rest[-1].startswith("--"))):
            joined.append(flag)
            continue
        value = value if equals else rest.pop()
        loaded, holds_texts = _load(value), list[str] in hints[key]
        starts = key not in given and get_origin(hints[key][0]) is list and isinstance(loaded, dict) != holds_texts
        if adds := loaded not in (None, []) and (key in given or (starts and not isinstance(loaded, list))):
            items = loaded if isinstance(loaded, list) else [value if holds_texts else loaded]
            value = json.dumps(items, ensure_ascii=False, default=str)
        joined += [f"--{key}=[]"] * (adds and starts) + [f"--{key}{'+' * adds}={value}"]
        given.add(key)
    return joined


def _load(value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
