"""`data.source`, `data.mix` and files → the inputs of a run, and the rows of an input as examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry
from toolkit.config.paths import split_own_source
from toolkit.config.validate import name_entries
from toolkit.data.rows.columns import KINDS, Columns, configured_columns, describe_columns
from toolkit.data.rows.example import Example, build_example
from toolkit.data.sources.files import COLUMNAR, READERS, find_files, find_kind, hash_file, list_struct_fields
from toolkit.data.sources.hub import check_hub_name, list_folder, load_hub_dataset, read_hub_rows
from toolkit.data.sources.own_function import load_own_source, read_options
from toolkit.data.sources.row import list_parts, show_names, take_part
from toolkit.data.sources.text_files import ALL_VALUES, Form, build_form, find_quotes, list_fields, suggest_delimiter
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.objectives.objective import Objective

_MAX_LATE_KEYS, _MAX_FIELDS = 20, 4


@dataclass(frozen=True, kw_only=True)
class RowInput:
    """One file, or one source that is not a file."""

    label: str
    """Its name in messages."""
    source: str
    """The kind of file, or the value of `data.source`."""
    read: Callable[[], Iterator[Any]]
    """Yields its rows by column."""
    columns: Columns | Callable[[object, list[str]], Columns]
    """Of a function of the user's, which may give rows of several kinds: what chooses those of a row, by its place and keys."""
    digest: str
    """Hex sha256 of its contents, and how they are read."""
    hashed: tuple[int, str] | None = None
    """How many of its rows were read for the digest, and their hash, where reading them again could give others."""
    is_eval_file: bool = False
    """Whether all its rows are evaluation rows."""
    mix_entry: int = 0
    """Inputs of one entry of a mix share `num_rows`."""
    set_name: str = ""
    """Name of the set of its evaluation rows; empty: none."""
    reading: str = ""
    """How its columns are read, see `describe_columns`; empty where each row has its own."""
    split: str = ""
    """Which files of a folder are its split, and which are left out."""
    for_generation: bool = False
    """Whether its rows need no answer, see `build_example`."""
    used: set[str] = field(default_factory=set)
    """The columns that were used of rows that have their own."""
    keys: frozenset[str] = frozenset()
    """The columns of a file, and of JSON those that are read wherever they come."""
    late_keys: dict[str, int] = field(default_factory=dict)
    """Other keys of JSON that were met, for messages, and the first row with each."""


def list_inputs(objective: Objective, config: DataConfig | LLMDataConfig, *, has_chat_template: bool = False) -> list[RowInput]:
    """The inputs of a run, evaluation files first. The argument and errors are those of `load_rows`."""
    of_hub = {name: getattr(config, name) for name in ("hub_subset", "hub_split", "hub_eval_split")}
    entries = {f"data.mix[{number}]": entry for number, entry in enumerate(config.mix)}
    entries = entries or {"data": MixEntry(source=config.source or "", files=config.files, **of_hub)}
    for setting, entry in entries.items():
        # Refuse a name that is not a source, and settings that the source would silently ignore.
        if split_own_source(entry.source) or (entry.files and (not entry.source or entry.source in READERS)):
            if entry.hub_eval_split:
                trouble = f"{setting}.hub_eval_split is {entry.hub_eval_split}, but {entry.source or 'files'} has no splits"
                raise UserError(f"{trouble}: leave it out, or name evaluation files in data.eval_files")
            continue
        check_hub_name(entry.source, f"{setting}.source", tuple(READERS))
        if entry.files:
            raise UserError(
                f"{setting}.files is given, but {setting}.source {entry.source} reads no files: leave one of them out"
            )
    is_own = any(split_own_source(entry.source) for entry in entries.values())
    choose = partial(objective.choose_columns, config=config, has_chat_template=has_chat_template)
    form = build_form(config.csv_delimiter, config.encoding)._replace(field=config.field)
    source = config.source if config.source in READERS else ""
    # Evaluation files and splits. A function that is the only source gets the files, and may read them.
    named = config.eval_files if isinstance(config.eval_files, dict) else {"": config.eval_files or []}
    open_rows, inputs = partial(_open_rows, config=config, choose=choose, form=form), list[RowInput]()
    for name, files in named.items():
        if files and not (is_own and "data" in entries):
            inputs += open_rows(MixEntry(source=source, files=files), "data.eval_files", is_eval_file=True, set_name=name)
    of_entries = list(zip(name_entries(config), entries.items(), strict=True))
    for name, (setting, entry) in of_entries:
        if entry.hub_eval_split:
            of_split = replace(entry, hub_split=entry.hub_eval_split)
            inputs += open_rows(of_split, f"{setting}.files", is_eval_file=True, set_name=name)
    # The other rows, of which some may be held out.
    for number, (name, (setting, entry)) in enumerate(of_entries):
        known: dict[str, Any] = {"mix_entry": number, "set_name": name}
        if split_own_source(entry.source):
            inputs.append(_open_own(entry, config, choose, setting, **known))
        else:
            inputs += open_rows(entry, f"{setting}.files", **known)
    if not is_own:  # a function may read the settings of files, and its columns are known once it has been called
        kinds = {item.source for item in inputs}
        if config.csv_delimiter and "csv" not in kinds:
            raise UserError(f"data.csv_delimiter is {config.csv_delimiter!r}, but no file is read as csv: leave it out")
        if config.encoding and not kinds.intersection(("csv", "tsv", "json", "jsonl", "txt")):
            raise UserError(f"data.encoding is {config.encoding}, but no text file is read: leave it out")
        if config.field and not kinds.intersection(("json", "jsonl")):
            raise UserError(f"data.field is {config.field}, but no file is read as json: leave it out")
        check_columns_used(config, inputs)
    return inputs


def _open_rows(
    entry: MixEntry, where: str, *, config: DataConfig | LLMDataConfig, choose: Callable[..., Columns], form: Form, **known: Any
) -> list[RowInput]:
    """The inputs of a source that is not a function, with other `known` fields; `where` names its files."""
    kind, split = entry.source if entry.source in READERS else "", ""
    if kind or not entry.source:
        paths = find_files(entry.files or [], where)
    else:
        paths, split = list_folder(entry.source, entry.hub_subset, entry.hub_split, other_sources=tuple(READERS))
    opened = [open_file(path, kind or find_kind(path, where), choose, form, **known) for path in paths]
    return [replace(item, split=split) for item in opened or [_open_hub(entry, config, choose, **known)]]


def check_columns_used(config: DataConfig | LLMDataConfig, inputs: list[RowInput]) -> None:
    """Refuse a column that the config names and no input has used, by a `UserError` with the setting."""
    used = {name for item in inputs for name in (item.columns.names if isinstance(item.columns, Columns) else item.used)}
    for setting, column in configured_columns(config).items():
        if column not in used:
            labels = ", ".join(item.label for item in inputs)
            trouble = f"no column of that name is read from {labels} with data.format {config.format}"
            raise UserError(f"{setting} is {column}, but {trouble}: name one that exists, or leave one of them out")


def describe_readings(inputs: list[RowInput]) -> list[str]:
    """The splits of folders, and a line for each way in which inputs are read, as in "a.json and 3 more: read as alpaca, …"."""
    labels: dict[str, list[str]] = {}
    for item in inputs:
        if item.reading:
            labels.setdefault(item.reading, []).append(item.label)
    lines = [
        f"{first}{f' and {len(more)} more' if more else ''}: read as {reading}" for reading, (first, *more) in labels.items()
    ]
    return [*dict.fromkeys(item.split for item in inputs if item.split), *lines]


def read_rows(item: RowInput) -> Iterator[Example | str]:
    """The rows of an input, each as an example or as the reason to skip it, so that every row keeps its position; a `UserError`
    for a row that cannot be read, a cell of the wrong type, a malformed conversation, or other rows than were hashed."""
    digest, number = hashlib.sha256(), 0
    changed = UserError(f"{item.label} gives other rows when it is called again: seed what is random, sort what has no order")
    for number, row in enumerate(_read_examples(item), start=1):
        if item.hashed:
            digest.update(repr(row).encode())
            if number == item.hashed[0] and digest.hexdigest() != item.hashed[1]:
                raise changed
        yield row
    if item.hashed and number != item.hashed[0]:
        raise changed


def _read_examples(item: RowInput) -> Iterator[Example | str]:
    for number, row in enumerate(item.read(), start=1):
        where = f"{item.label}, row {number}"
        if item.keys and not row.keys() <= item.keys:
            for key in sorted(row.keys() - item.keys):
                key = show_names([key]) if len(item.late_keys) < _MAX_LATE_KEYS else "and others"
                item.late_keys.setdefault(key, number)
        # In files and datasets, a column `group` or `split` is the user's and means nothing here.
        columns, options = item.columns, dict[str, Any]()
        if not isinstance(columns, Columns):
            options = read_options(row, where)
            if "skip" in options:
                yield options["skip"]
                continue
            names = list_parts(
                {key if isinstance(key, str) else f"{key!r} of type {type(key).__name__}": row[key] for key in row}
            )
            columns = columns(where, names)
            item.used.update(columns.names)
        if parts := [name for name in columns.names if name not in row]:
            row = row | {name: take_part(row, name) for name in parts}
        yield build_example(row, columns, where, for_generation=item.for_generation, **options)


def _hash_rows(rows: Iterable[Any]) -> tuple[int, str]:
    """The number of rows that do not come from a file, and a hex sha256 of them."""
    digest, num_rows = hashlib.sha256(), 0
    for row in rows:
        digest.update(repr(row).encode())
        num_rows += 1
    return num_rows, digest.hexdigest()


def open_file(path: Path, kind: str, choose: Callable[..., Columns], form: Form, **known: Any) -> RowInput:
    """A file as an input with other `known` fields; it is read once for its digest, and `choose` gets its path and columns.

    A file that is broken, or without usable columns, is a `UserError`.
    """
    (read, list_columns), is_text = READERS[kind], kind not in COLUMNAR
    digest = hash_file(path, is_text=is_text, encoding=form.encoding)  # first, because it reports unreadable files best
    form = find_quotes(path, form) if kind == "tsv" else form
    about = f"; double quotes are text, as in line {form.text_quote}" if form.text_quote else ""
    existing = list_columns(path, form)
    if not existing:
        raise UserError(f"{path} holds no rows: give a source with at least one")
    try:
        columns = choose(path, existing)
    except UserError as error:
        reason, guesses, fields = str(error), list[str](), list[str]()
        if kind in ("json", "jsonl") and form.field is None:
            guesses, fields = list_fields(path, form)
        for field in guesses:
            try:
                return open_file(path, kind, choose, form._replace(field=field), **known)
            except UserError as inner:
                reason = str(inner)
        if fields and guesses[-1:] != fields:
            more = f" and {len(fields) - _MAX_FIELDS} more" * (len(fields) > _MAX_FIELDS)
            named = f"{' and '.join(fields[:_MAX_FIELDS])}{more}"
            reason += f"; if the lists under {named} are the rows, set data.field to one of them"
        raise UserError(f"{reason}{suggest_delimiter(existing, form) if kind == 'csv' else about}") from None
    if kind in ("json", "jsonl"):  # optional columns may come in later rows than were looked at
        columns = columns._replace(names=tuple(dict.fromkeys(columns.names + KINDS[columns.kind].optional)))
    details = f" {form.encoding} {form.delimiter}{f' {form.field}' if form.field else ''}" if is_text else ""
    about += f"; its rows are {'its values' if form.field == ALL_VALUES else f'under {form.field}'}" if form.field else ""
    return RowInput(
        label=str(path),
        source=kind,
        read=partial(read, path, columns.names, form),
        columns=columns,
        digest=f"{digest} {kind} {columns}{details}",
        reading=describe_columns(columns, existing) + "; a row is a paragraph between blank lines" * (kind == "txt") + about,
        keys=frozenset((*existing, *columns.names)),
        **known,
    )


def _open_own(entry: MixEntry, config: Any, choose: partial[Columns], setting: str, **known: Any) -> RowInput:
    if isinstance(config.eval_files, dict) and not config.mix:
        raise UserError(f"data.eval_files has names, but {entry.source} reads these files: give a list of them")
    if config.mix:
        config = replace(config, mix=[], source=entry.source, files=entry.files, eval_files=None)
    read, identity, is_identified = load_own_source(config, setting)
    digest = f"{identity} {sorted(configured_columns(config).items())}"
    item = RowInput(label=entry.source, source=entry.source, read=read, columns=choose, digest=digest, **known)
    if is_identified:  # its rows are not read here, so the digest has what decides how they are
        digest += f" {config.format}" * (config.format != "auto")
        digest += " chat template" * choose.keywords["has_chat_template"]
        return replace(item, digest=digest)
    # Read once to be hashed, and again to be used.
    hashed = _hash_rows(islice(_read_examples(item), config.num_rows))
    return replace(item, digest=f"{digest} {hashed}", hashed=hashed)


def _open_hub(entry: MixEntry, config: DataConfig | LLMDataConfig, choose: Callable[..., Columns], **known: Any) -> RowInput:
    """A hub dataset, or a folder that only `datasets` can read."""
    dataset = load_hub_dataset(entry.source, entry.hub_subset, entry.hub_split, other_sources=tuple(READERS))
    existing = list_struct_fields(dataset.features.arrow_schema)
    columns = choose(entry.source, existing)
    # The fingerprint of `datasets` depends on paths and times; only the rows themselves are the same on every machine.
    read = partial(read_hub_rows, dataset, columns.names)
    _, digest = _hash_rows(islice(read(), None if known.get("is_eval_file") else config.num_rows))
    return RowInput(
        label=f"{entry.source}, split {entry.hub_split}" if entry.hub_eval_split else entry.source,
        source=entry.source,
        read=read,
        columns=columns,
        digest=f"{digest} {columns}",
        reading=describe_columns(columns, existing),
        **known,
    )
