"""Command-line handling that jsonargparse lacks: flags win over files, repeated list flags add up."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args, get_origin

from toolkit.config.facts import exclusive_pairs, facts_of
from toolkit.config.messages import given_flags, known_keys, sentence
from toolkit.errors import UserError


def unset_counterparts(flags: list[str], config_class: type) -> list[str]:
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
    except argparse.ArgumentError as error:
        raise UserError(sentence(str(error), object, [], {})) from None
    return known.config, flags


def join_lists(flags: list[str], config_class: type) -> list[str]:
    """Join `--data.files a --data.files b` into one flag with a list, at the first one's place. argparse would keep the last."""
    hints = {
        key: hint
        for key, hint in known_keys(config_class)[0].items()
        if any(get_origin(option) is list for option in (hint, *get_args(hint)))
    }
    joined: list[str] = []
    places: dict[str, int] = {}
    values: dict[str, list[str]] = {}
    rest = flags[::-1]
    while rest:
        flag = rest.pop()
        key, equals, value = flag.removeprefix("--").partition("=")
        is_whole = equals or (rest and not rest[-1].startswith("--"))
        if not (flag.startswith("--") and key in hints and is_whole):
            joined.append(flag)
            continue
        if key not in places:
            places[key] = len(joined)
            joined.append("")
        values.setdefault(key, []).append(value if equals else rest.pop())
    for key, place in places.items():
        joined[place] = f"--{key}={_join(values[key], hints[key])}"
    return joined


def _join(values: list[str], hint: Any) -> str:
    """One list of items and lists. null and [] drop the items before. A single item becomes a list only in a field of texts."""
    loaded = [_load(value) for value in values]
    if len(values) == 1 and (hint != list[str] or isinstance(loaded[0], list | dict | None)):
        return values[0]
    holds_texts = list[str] in (hint, *get_args(hint))
    items: list[Any] = []
    for value, content in zip(values, loaded, strict=True):
        added = content if isinstance(content, list) else [value if holds_texts else content]
        items = [] if content in (None, []) else [*items, *added]
    return json.dumps(items, ensure_ascii=False, default=str)


def _load(value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
