"""What is true of a config field besides its type. It stands on the field: resumes, exports, ranks, paths and cards read it."""

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of a field; `resume` of a section holds for its fields."""

    hint: Any
    """Its type."""
    default: Any = MISSING
    resume: bool = False
    """A resumed run may set it otherwise."""
    export: bool = False
    """`python -m toolkit export` may set it otherwise than the run."""
    per_rank: bool = False
    """Ranks may differ in it."""
    path: Literal["path", "pattern", "named", "entries"] | None = None
    """It may hold a path to read: one, a glob pattern, a name (a path only with a slash, or as a Python file), or a list of
    records with facts of their own. A value that matches no path, such as a hub id, stays as it is."""
    in_card: bool = True
    """The model card shows it, unless it is the default."""
    excludes: str | None = None
    """Another field of its section: a run gives one of both, and the flag of one unsets the other."""


def stated(default: Any = MISSING, *, default_factory: Any = MISSING, **facts: Any) -> Any:
    """A dataclass field with `Facts`."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata=facts)


def facts_of(config_class: type) -> dict[str, Facts]:
    """The facts of a config's or a section's fields by dotted key, in their order."""
    found: dict[str, Facts] = {}
    hints = get_type_hints(config_class)
    for own in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(section := hints[own.name]) and isinstance(section, type):
            inner = facts_of(section).items()
            found |= {f"{own.name}.{name}": dataclasses.replace(facts, **own.metadata) for name, facts in inner}
        else:
            default = own.default if own.default_factory is MISSING else own.default_factory()
            found[own.name] = Facts(hint=section, default=default, **own.metadata)
    return found


def exclusive_pairs(config_class: type) -> list[tuple[str, str]]:
    """Dotted keys of which a run has one or the other."""
    facts = facts_of(config_class).items()
    return [(f"{key.rpartition('.')[0]}.{own.excludes}", key) for key, own in facts if own.excludes]
