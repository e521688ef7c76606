"""What is wrong with a run config, in one sentence: the key, the value, where it stands and what may stand there.

jsonargparse checks types and flags, but speaks of its own classes and forgets the file. So the YAML is looked through here
first, strictly: unknown keys, keys given twice and broken files are told with the line; a type error gets its place from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config.names import find_by_meaning, say_elsewhere
from toolkit.errors import UserError

_ALLOWED = {
    PositiveInt: "a whole number of 1 or more",
    NonNegativeInt: "a whole number of 0 or more",
    PositiveFloat: "a number above 0",
    NonNegativeFloat: "a number of 0 or more",
    ClosedUnitInterval: "a number from 0 to 1",
    bool: "true or false",
    str: "text, in quotes if it looks like a number",
    types.NoneType: "null",
}


@dataclass(frozen=True)
class Entry:
    """A value as it stands in a run YAML."""

    path: Path
    line: int
    text: str


def load_entries(path: Path, config_class: type) -> dict[str, Entry]:
    """Every value of a run YAML under its dotted key, as it stands in the file; types are not checked.

    Raises:
        UserError: the file cannot be read or is broken, a key is unknown (the nearest is suggested) or given twice, a section
            is not a mapping; all but the first with the line.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {path} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8 ({error.reason}): convert the file") from None
    except yaml.MarkedYAMLError as error:
        where = f"{path}, line {error.problem_mark.line + 1}" if error.problem_mark else str(path)
        raise UserError(f"{where}: broken YAML ({error.problem}): write `key: value`, indented under its section") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: broken YAML ({' '.join(str(error).split())}): is this a text file?") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys and values: write them as in `log_every_steps: 10`")
    entries: dict[str, Entry] = {}
    _collect_entries(root, "", path, text, config_class, entries)
    return entries


def _collect_entries(node: Any, prefix: str, path: Path, text: str, config_class: type, entries: dict[str, Entry]) -> None:
    leaves, sections = known_keys(config_class)
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        entry = Entry(path, line, text[value_node.start_mark.index : value_node.end_mark.index].strip())
        if key in first_lines or key in entries:
            first = first_lines[key] if key in first_lines else entries[key].line
            raise UserError(f"{path}, line {line}: {key} was given before, on line {first}: keep one of them")
        first_lines[key] = line
        if key in sections:
            if value_node.id != "mapping":
                trouble = f"is {_shortened(entry.text)}" if entry.text else "is empty"
                example = next(leaf for leaf in leaves if leaf.startswith(f"{key}."))
                raise UserError(
                    f"{path}, line {line}: {key} {trouble}: indent its keys under it, such as {example}, or leave it out"
                )
            _collect_entries(value_node, f"{key}.", path, text, config_class, entries)
        elif key not in leaves:
            raise UserError(f"{path}, line {line}: unknown key {key}{suggestion(key, config_class)}")
        else:
            entries[key] = entry
            if found := _find_trouble_in_list(key, leaves[key], value_node):
                raise UserError(f"{path}, line {found[0].start_mark.line + 1}: {found[1]}")
            # jsonargparse takes null for "not given", whatever the type.
            if value_node.tag == "tag:yaml.org,2002:null" and types.NoneType not in get_args(leaves[key]):
                raise UserError(_type_sentence(key, leaves[key], [], entries))


def _find_trouble_in_list(key: str, hint: Any, node: Any) -> tuple[Any, str] | None:
    """What is wrong with a list of sections (`list[MixEntry]`), if the field is one: the YAML node, and a sentence."""
    section_class = get_args(hint)[0] if get_origin(hint) is list else None
    if not dataclasses.is_dataclass(section_class) or node.tag == "tag:yaml.org,2002:null":
        return None
    hints = get_type_hints(section_class)
    if node.id != "sequence" or any(item.id != "mapping" for item in node.value):
        return node, f"{key} is not a list of keys with values: write {allowed(hint)}"
    for place, item in enumerate(node.value):
        given = {key_node.value: (key_node, value_node) for key_node, value_node in item.value}
        for name, (key_node, value_node) in given.items():
            if name not in hints:
                near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
                way_out = f": did you mean {near[0]}?" if near else f"; known are {', '.join(hints)}"
                return key_node, f"unknown key {key}[{place}].{name}{way_out}"
            if isinstance(hints[name], type) and issubclass(hints[name], int | float):
                try:
                    hints[name](value_node.value)
                except (ValueError, TypeError):
                    shown = _shortened(str(value_node.value))
                    return value_node, f"{key}[{place}].{name} is {shown}: write {allowed(hints[name])}"
        for f in dataclasses.fields(section_class):
            if f.default is f.default_factory is dataclasses.MISSING and f.name not in given:
                return item, f"{key}[{place}] has no {f.name}: give one"
    return None


def known_keys(config_class: type) -> tuple[dict[str, Any], list[str]]:
    """Dotted keys of a config dataclass with their types, and the names of its sections."""
    leaves: dict[str, Any] = {}
    sections = []
    for name, hint in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(hint):
            sections.append(name)
            leaves |= {f"{name}.{inner}": inner_hint for inner, inner_hint in get_type_hints(hint).items()}
        else:
            leaves[name] = hint
    return leaves, sections


def suggestion(key: str, config_class: type, prefix: str = "") -> str:
    """ ": did you mean optim.lr?" for `learning_rate`, `optim.lrr`, `lr` or `optmi.lr`; where no key is near, those there are.

    By meaning first, then by spelling.
    """
    leaves, sections = known_keys(config_class)
    section, _, name = key.rpartition(".")
    if "resize" in name:
        return (
            ": the vocabulary is not resized under sharding: resize the model with transformers' resize_token_embeddings, save "
            f"it and give that as {prefix}model.name_or_path"
        )
    siblings = [leaf for leaf in leaves if section in sections and leaf.startswith(f"{section}.")]
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    meant = find_by_meaning(name, leaves)
    if not (namesakes or meant) and (where := say_elsewhere(name)):
        return f": {where}"
    if namesakes:
        near = difflib.get_close_matches(key, namesakes, n=1, cutoff=0)
    elif meant:
        near = [leaf for leaf in meant if leaf in siblings] or _nearest_of_section(name, siblings, cutoff=0.8) or meant
    elif siblings:
        near = _nearest_of_section(name, siblings, cutoff=0.5)
    else:
        near = difflib.get_close_matches(key, list(leaves) if section else [*sections, *leaves], n=1, cutoff=0.6)
    if near:
        return f": did you mean {prefix}{near[0]}?"
    known = siblings or [*sections, *(leaf for leaf in leaves if "." not in leaf)]
    return f"; known are {', '.join(prefix + other for other in known)}"


def _nearest_of_section(name: str, siblings: list[str], cutoff: float) -> list[str]:
    """By their names alone: the section's own letters would make all of them near."""
    return [
        leaf
        for near in difflib.get_close_matches(name, [leaf.rpartition(".")[2] for leaf in siblings], n=1, cutoff=cutoff)
        for leaf in siblings
        if leaf.endswith(f".{near}")
    ]


def sentence(message: str, config_class: type, flags: list[str], entries: dict[str, Entry]) -> str:
    """jsonargparse's message as one sentence.

    Args:
        flags: the command line without `--config`, where the message is about it.
        entries: of the run YAML, where the message is about that.
    """
    leaves, sections = known_keys(config_class)
    for key, value in _given_flags(flags):
        if key in leaves and (node := _compose(value)) and (found := _find_trouble_in_list(key, leaves[key], node)):
            return f"--{found[1]}" if found[1].startswith(key) else f"--{key}: {found[1]}"
    if unknown := re.search(r"unrecognized arguments: (\S+)", message):
        if not unknown[1].startswith("--"):
            return f"unexpected argument {unknown[1]}: write flags as in --optim.lr 1e-4, and a list as '[a, b]' or flag by flag"
        flag = unknown[1].split("=")[0]
        return f"unknown flag {flag}{suggestion(flag[2:], config_class, prefix='--')}"
    if unknown := re.search(r"Group '(\S+)' does not accept option '(\S+)'", message):
        return f"unknown key {unknown[1]}.{unknown[2]}{suggestion(f'{unknown[1]}.{unknown[2]}', config_class)}"
    if missing := re.search(r"the following arguments are required: (.+)", message):
        first = missing[1].split(",")[0]
        return f"missing in the run config: {missing[1]} (give it in --config FILE or as --{first} VALUE)"
    if valueless := re.search(r"argument (--\S+): expected one argument", message):
        return f"{valueless[1]} has no value: give one, as in {valueless[1]} VALUE"
    keys = [key for key in re.findall(r'Parser key "(\S+)"', message) if key in leaves or key in sections]
    if not keys:
        return " ".join(message.split())
    if keys[-1] in sections:
        example = next(leaf for leaf in leaves if leaf.startswith(f"{keys[-1]}."))
        return f"--{keys[-1]} takes a section as a whole, '{{...}}' or a file: give its keys one by one, as in --{example} VALUE"
    return _type_sentence(keys[-1], leaves[keys[-1]], flags, entries)


def _type_sentence(key: str, hint: Any, flags: list[str], entries: dict[str, Entry]) -> str:
    """Where the value stands, and what is allowed there."""
    if key in entries:
        entry = entries[key]
        return f"{entry.path}, line {entry.line}: {key} is {_shortened(entry.text) or 'null'}: write {allowed(hint)}"
    for name, given in _given_flags(flags):
        if name == key:
            return f"--{key} is {_shortened(given)}: give {allowed(hint)}"
    return f"{key} has a value of the wrong type: give {allowed(hint)}"


def _given_flags(flags: list[str]) -> list[tuple[str, str]]:
    """(key, value) of the flags on the command line, the last one first, which is the one that counts."""
    pairs = list(zip(flags, [*flags[1:], ""], strict=False))
    given = [(*flag[2:].partition("="), value) for flag, value in reversed(pairs) if flag.startswith("--")]
    return [(name, own if equals else value) for name, equals, own, value in given]


def _compose(text: str) -> Any:
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None


def allowed(hint: Any) -> str:
    """What a field takes, in words: `PositiveInt | None` → "a whole number of 1 or more, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(allowed(argument) for argument in sorted(arguments, key=lambda argument: argument is str))
    if origin is Literal:
        return _either(arguments)
    if origin is list and dataclasses.is_dataclass(arguments[0]):
        first, second = dataclasses.fields(arguments[0])[:2]
        return f"a list as in [{{{first.name}: ..., {second.name}: ...}}, ...]"
    if origin is list:
        example = "['a', 'b']" if arguments[0] is str else "[10, 12]"
        return f"a list as in {example}"
    return _ALLOWED[hint]


def _either(choices: Iterable[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}"


def _shortened(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 60 else f"{one_line[:60]}…"
