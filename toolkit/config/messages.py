"""Error messages for a wrong run config: one sentence with the key, the value, its file and line, and what is allowed.

jsonargparse checks types and flags, but its messages name its own classes and no line. So the YAML is checked here first:
unknown keys, duplicate keys and broken files are reported with their line, and type errors get theirs from the same index.
"""

import dataclasses
import difflib
import re
import types
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config.facts import facts_of
from toolkit.config.schema import HalfOpenUnitInterval, NumEpochs
from toolkit.errors import UserError

_ALLOWED = {
    PositiveInt: "a whole number of 1 or more",
    NonNegativeInt: "a whole number of 0 or more",
    PositiveFloat: "a number above 0",
    NonNegativeFloat: "a number of 0 or more",
    ClosedUnitInterval: "a number from 0 to 1",
    HalfOpenUnitInterval: "a number of 0 or more and below 1",
    NumEpochs: "a number above 0",
    bool: "true or false",
    str: "text, in quotes if it looks like a number",
    types.NoneType: "null",
}


_LINE_OF_PAGE = re.compile(r"^\| `(?:\S+\.)?(\S+)` \| (?:`(\S+)`(?: (\(.+\)))?|(.+)) \|$", re.MULTILINE)
"""In `migrating.md` beside this file: a name in other trainers, and our field with what to write there, or a sentence. Spelling
alone would mislead: `--report_to` means `tracking.log_with`, but is spelled more like `export`."""


@dataclass(frozen=True)
class Entry:
    """A value in a run YAML, as text, with its file and line."""

    path: Path
    line: int
    text: str


def load_entries(path: Path, config_class: type) -> dict[str, Entry]:
    """Every value and section of a run YAML by its dotted key, as text. Types are not checked. A file that cannot be read is a
    `UserError`; so are, with their line, one that is broken, a key that is unknown (the nearest is suggested) or given twice, and
    a section that is not a mapping."""
    import yaml

    _, text = read_yaml(path, "log_every_steps: 10")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    entries: dict[str, Entry] = {}
    if unknown := _collect_entries(root, "", path, text, config_class, entries):
        raise UserError(f"{path}, {'; '.join(unknown)}")
    return entries


def read_yaml(path: Path, example: str) -> tuple[dict[Any, Any], str]:
    """The keys and values of a YAML file, as in `example`, and its text; if there are none, or it cannot be read, a `UserError`
    with the line, if it has one."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"--config {path} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8 ({error.reason}): convert the file") from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError) as error:  # `!!int abc` raises a ValueError
        mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None) or " ".join(str(error).split())
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: broken YAML ({reason}): write `key: value`, indented under its section") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys and values: write them as in `{example}`")
    return content, text


def _collect_entries(node: Any, prefix: str, path: Path, text: str, config_class: type, entries: dict[str, Entry]) -> list[str]:
    """Put the entries of a mapping into `entries`; returns a sentence for each unknown key, of which a file may have several."""
    leaves, sections = known_keys(config_class)
    unknown: list[str] = []
    for key_node, value_node in node.value:
        # The entry, as text; a key may be given once.
        line = key_node.start_mark.line + 1
        key = f"{prefix}{key_node.value}"
        if key in entries:
            raise UserError(f"{path}, line {line}: {key} was given before, on line {entries[key].line}: keep one of them")
        entry = entries[key] = Entry(path, line, text[value_node.start_mark.index : value_node.end_mark.index].strip())

        # A section: descend. A leaf: check what jsonargparse would accept or report without the line.
        if key in sections:
            if value_node.id != "mapping":
                trouble = f"is {_shortened(entry.text)}" if entry.text else "is empty"
                example = next(leaf for leaf in leaves if leaf.startswith(f"{key}."))
                raise UserError(
                    f"{path}, line {line}: {key} {trouble}: indent its keys under it, such as {example}, or leave it out"
                )
            unknown += _collect_entries(value_node, f"{key}.", path, text, config_class, entries)
        elif key not in leaves:
            unknown.append(f"line {line}: unknown key {key}{suggestion(key, config_class)}")
        else:
            names = [name.value for name, _ in value_node.value] if value_node.id == "mapping" else []
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}, line {line}: {key} has {twice[0]} twice: keep one of them")
            if found := _find_trouble_in_list(key, leaves[key], value_node):
                raise UserError(f"{path}, line {found[0].start_mark.line + 1}: {found[1]}")
            # jsonargparse accepts null as "not given" for every type.
            if value_node.tag == "tag:yaml.org,2002:null" and types.NoneType not in get_args(leaves[key]):
                raise UserError(_type_sentence(key, leaves[key], [], entries))
    return unknown


def _find_trouble_in_list(key: str, hint: Any, node: Any) -> tuple[Any, str] | None:
    """The wrong YAML node in a list of sections (`list[MixEntry]`) and a sentence about it; None if nothing is wrong."""
    section_class = get_args(hint)[0] if get_origin(hint) is list else None
    if not dataclasses.is_dataclass(section_class) or node.tag == "tag:yaml.org,2002:null":
        return None
    hints = get_type_hints(section_class)
    if node.id != "sequence" or any(item.id != "mapping" for item in node.value):
        return node, f"{key} is not a list of keys with values: write {allowed(hint)}"
    for place, item in enumerate(node.value):
        for key_node, value_node in item.value:
            name = key_node.value
            if name not in hints:
                return key_node, f"unknown key {key}[{place}].{name}{nearest(name, hints, cutoff=0.5)}"
            if isinstance(hints[name], type) and issubclass(hints[name], int | float):
                try:
                    hints[name](value_node.value)
                except (ValueError, TypeError):
                    shown = _shortened(str(value_node.value))
                    return value_node, f"{key}[{place}].{name} is {shown}: write {allowed(hints[name])}"
    return None


def known_keys(config_class: type) -> tuple[dict[str, Any], list[str]]:
    """The dotted keys of a config dataclass with their types, and the names of its sections."""
    leaves = {key: facts.hint for key, facts in facts_of(config_class).items()}
    return leaves, [name for name, hint in get_type_hints(config_class).items() if dataclasses.is_dataclass(hint)]


def nearest(name: str, known: Collection[str], cutoff: float) -> str:
    """The end of the message for an unknown name: the known one that is spelled most like it, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f": did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def suggestion(key: str, config_class: type, prefix: str = "") -> str:
    """The end of the message for an unknown key: ": did you mean optim.lr?" for `learning_rate`, `optim.lrr` or `lr`.

    Names of other trainers come first, then similar spelling. If no key is near, it lists the known ones.
    """
    leaves, sections = known_keys(config_class)
    section, _, name = key.rpartition(".")
    # Candidates: keys of the same section, keys of the same name, keys that another trainer calls by this name.
    siblings = [leaf for leaf in leaves if section in sections and leaf.startswith(f"{section}.")]
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    meanings = find_meanings(name)
    meant = [leaf for leaf, _, _ in meanings if leaf in leaves]
    if not (namesakes or meant) and (elsewhere := say_elsewhere(name)):
        return f": {elsewhere}"
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in siblings}  # without the section, whose letters would make all similar
    if namesakes:
        near = difflib.get_close_matches(key, namesakes, n=1, cutoff=0)
    elif meant:
        alike = difflib.get_close_matches(name, by_name, n=1, cutoff=0.8)
        near = [leaf for leaf in meant if leaf in siblings] or [by_name[other] for other in alike] or meant
    elif siblings:
        near = [by_name[other] for other in difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)]
    else:
        near = difflib.get_close_matches(key, list(leaves) if section else [*sections, *leaves], n=1, cutoff=0.6)
    if near:
        values = [f" {value}" for _, value, _ in meanings if value and not section]
        return f": did you mean {prefix}{near[0]}{''.join(values[:1])}?"
    known = siblings or [*sections, *(leaf for leaf in leaves if "." not in leaf)]
    return f"; known are {', '.join(prefix + other for other in known)}"


def find_meanings(name: str) -> list[tuple[str, str, str]]:
    """What `name` means in other trainers, by the lines of the tables: our field as a dotted key, and what to write for it, in
    brackets (empty: the same value); or two empty texts, and a sentence that says where to set something that is not a field."""
    page = Path(__file__).with_name("migrating.md").read_text(encoding="utf-8")
    wanted = name.lower().replace("-", "_")
    found = _LINE_OF_PAGE.findall(page)
    return [(field, value, text) for other, field, value, text in found if other.lower().replace("-", "_") == wanted]


def say_elsewhere(name: str) -> str | None:
    """A sentence that says where to set something that is not a field; None if `name` is unknown."""
    return next((text for _, _, text in find_meanings(name) if text), None)


def sentence(message: str, config_class: type, flags: list[str], entries: dict[str, Entry]) -> str:
    """Translate jsonargparse's error message into one sentence. It is about `flags`, the command line without `--config`, or
    about `entries`, the values of the run YAML; the other one is empty."""
    import yaml

    leaves, sections = known_keys(config_class)
    # Unknown, missing and incomplete arguments.
    for key, value in given_flags(flags):
        with suppress(yaml.YAMLError):
            node = yaml.compose(value, Loader=yaml.SafeLoader)
            if key in leaves and node and (found := _find_trouble_in_list(key, leaves[key], node)):
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
    # Values of the wrong type.
    keys = [key for key in re.findall(r'Parser key "(\S+)"', message) if key in leaves or key in sections]
    if not keys:
        return " ".join(message.split())
    if keys[-1] in sections:
        example = next(leaf for leaf in leaves if leaf.startswith(f"{keys[-1]}."))
        value = dict(reversed(given_flags(flags))).get(keys[-1], "")
        if where := say_elsewhere(keys[-1]):  # another trainer's flag
            return f"--{keys[-1]} is {value}: {say_elsewhere(value) or where}, as in --{example} VALUE"
        return f"--{keys[-1]} takes a section as a whole, '{{...}}' or a file: give its keys one by one, as in --{example} VALUE"
    return _type_sentence(keys[-1], leaves[keys[-1]], flags, entries)


def _type_sentence(key: str, hint: Any, flags: list[str], entries: dict[str, Entry]) -> str:
    """The sentence for a value of the wrong type: its place, the value, what is allowed, and why another trainer's is not."""

    def why(value: str) -> str:
        where = say_elsewhere(value) if get_origin(hint) is Literal else None
        return f" ({where})" if where else ""

    if key in entries:
        entry = entries[key]
        shown = f"{_shortened(entry.text) or 'null'}{why(entry.text)}"
        return f"{entry.path}, line {entry.line}: {key} is {shown}: write {allowed(hint)}"
    for name, given in given_flags(flags):
        if name == key:
            return f"--{key} is {_shortened(given)}{why(given)}: give {allowed(hint)}"
    return f"{key} has a value of the wrong type: give {allowed(hint)}"


def given_flags(flags: list[str]) -> list[tuple[str, str]]:
    """(key, value) of the flags, also of those that end in `+`; the last one first, because the last one wins."""
    pairs = list(zip(flags, [*flags[1:], ""], strict=False))
    given = [(*flag[2:].partition("="), value) for flag, value in reversed(pairs) if flag.startswith("--")]
    return [(name.removesuffix("+"), own if equals else value) for name, equals, own, value in given]


def allowed(hint: Any) -> str:
    """The allowed values of a field, in words: `PositiveInt | None` → "a whole number of 1 or more or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(allowed(argument) for argument in sorted(arguments, key=lambda argument: argument is str))
    if origin is Literal:
        return _either(arguments)
    if origin is list and dataclasses.is_dataclass(arguments[0]):
        first, *_, last = dataclasses.fields(arguments[0])
        return f"a list as in [{{{first.name}: ..., {last.name}: ...}}, ...]"
    if origin is dict:
        return "names as in {news: a.csv, mail: [b.csv, c.csv]}"
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
