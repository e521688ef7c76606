"""`data.source` or `data.mix` of a causal model's run → rows, each of them an example as JSON (see `messages.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.config.data import LLMDataConfig, MixEntry
from toolkit.config.paths import split_own_source
from toolkit.data.rows.cache import TextRows, cache_folder, hash_rows, load_rows
from toolkit.data.rows.messages import Columns, build_row, choose_columns, configured_columns
from toolkit.data.sources.files import READERS, Cells, find_files, hash_file, list_columns
from toolkit.data.sources.hub import check_hub_name, load_hub_dataset, read_hub_rows
from toolkit.data.sources.own import build_own_input, load_own_source, read_own_rows
from toolkit.data.sources.row import Row, RowInput
from toolkit.errors import UserError

EXAMPLE_VERSION = 2
"""Part of the fingerprint. Raise it when the same cells would give different examples."""

NAMED_SOURCES = ("docstrings", "stdlib", *READERS)


def load_llm_rows(config: LLMDataConfig) -> TextRows:
    """Read, check and split the rows of `data.source`, or of every entry of `data.mix`. For one process per node; no collectives.

    A hash of a row's group (the prompt, the first user message, or the full text) decides its split. `data.eval_files`
    replaces this, and training rows that are in them are left out. `docstrings` and `stdlib` have splits of their own.

    Raises:
        UserError: a file or dataset that is missing, broken, without usable columns or rows; a malformed conversation.
    """
    entries = config.mix or [
        MixEntry(source=config.source or "", files=config.files, hub_subset=config.hub_subset, hub_split=config.hub_split)
    ]
    columns_used: set[str] = set()
    has_own = any(split_own_source(entry.source) for entry in entries)
    reads_eval_files = not has_own or bool(config.mix)  # an own source on its own gets them
    inputs = list(_build_eval_inputs(config, columns_used)) if reads_eval_files else []
    for number, entry in enumerate(entries):
        setting = f"data.mix[{number}]" if config.mix else "data"
        inputs += _build_inputs(entry, config, number, setting, columns_used)
    for setting, column in configured_columns(config).items():
        if column not in columns_used and not has_own:
            labels = ", ".join(item.label for item in inputs)
            raise UserError(f"{setting} is {column}, but that is no column of {labels}: name one that exists, or leave it out")
    brings_split = all(entry.source in ("docstrings", "stdlib") for entry in entries)
    return load_rows(
        inputs,
        cache_folder(config.cache_dir),
        identity={"examples": EXAMPLE_VERSION, "mix_entries": [item.mix_entry for item in inputs]},
        eval_fraction=None if (config.eval_files and reads_eval_files) or brings_split else config.eval_fraction,
        num_rows=config.num_rows,
    )


def _build_eval_inputs(config: LLMDataConfig, columns_used: set[str]) -> Iterator[RowInput]:
    for path in find_files(config.eval_files or [], "data.eval_files"):
        kind = config.source if config.source in READERS else path.suffix.lstrip(".")
        if kind not in READERS:
            raise UserError(f"data.eval_files: {path} has an unknown file ending: let its name end in .csv, .jsonl or .parquet")
        yield _build_file_input(path, kind, config, 0, columns_used, is_eval_file=True)


def _build_inputs(entry: MixEntry, config: LLMDataConfig, mix_entry: int, setting: str, columns_used: set[str]) -> list[RowInput]:
    if split_own_source(entry.source):
        return [_build_own_input(entry, config, mix_entry, setting)]
    if entry.source not in NAMED_SOURCES:
        check_hub_name(entry.source, f"{setting}.source", NAMED_SOURCES)
    if entry.source not in READERS and entry.files:
        raise UserError(f"{setting}.files is given, but {setting}.source {entry.source} reads no files: leave one of them out")
    if entry.source == "docstrings":
        return [_build_docstrings_input(mix_entry)]
    if entry.source == "stdlib":
        return [_build_stdlib_input(mix_entry)]
    if entry.source not in READERS:
        return [_build_hub_input(entry, config, mix_entry, columns_used)]
    paths = find_files(entry.files or [], f"{setting}.files")
    return [_build_file_input(path, entry.source, config, mix_entry, columns_used) for path in paths]


def _build_file_input(
    path: Path, kind: str, config: LLMDataConfig, mix_entry: int, columns_used: set[str], *, is_eval_file: bool = False
) -> RowInput:
    digest = hash_file(path, is_text=kind != "parquet")  # first, because it reports unreadable files best
    existing = list_columns(path, kind)
    if not existing:
        raise UserError(f"{path} holds no rows: give a source with at least one")
    columns = choose_columns(path, existing, config)
    columns_used.update(columns.names)
    read_cells = partial(READERS[kind], path, columns.names)
    return RowInput(
        label=str(path),
        columns=None,
        digest=f"{digest} {kind} {columns}",
        read=partial(_read_examples, read_cells, columns, str(path), mix_entry),
        is_eval_file=is_eval_file,
        mix_entry=mix_entry,
    )


def _build_hub_input(entry: MixEntry, config: LLMDataConfig, mix_entry: int, columns_used: set[str]) -> RowInput:
    dataset = load_hub_dataset(entry.source, entry.hub_subset, entry.hub_split, other_sources=NAMED_SOURCES)
    columns = choose_columns(entry.source, dataset.column_names, config)
    columns_used.update(columns.names)
    read_cells = partial(read_hub_rows, dataset, entry.source, columns.names)
    return RowInput(
        label=entry.source,
        columns=None,
        # The fingerprint of `datasets` depends on paths and times; only the rows themselves are the same on every machine.
        digest=f"{hash_rows(islice(read_cells(), config.num_rows))} {columns}",
        read=partial(_read_examples, read_cells, columns, entry.source, mix_entry),
        mix_entry=mix_entry,
    )


def _build_own_input(entry: MixEntry, config: LLMDataConfig, mix_entry: int, setting: str) -> RowInput:
    of_entry: dict[str, Any] = {"mix": [], "source": entry.source, "files": entry.files, "eval_files": None} if config.mix else {}
    own = load_own_source(dataclasses.replace(config, **of_entry), setting)
    configured = configured_columns(config)

    def read() -> Iterator[Row]:
        for where, row, fields in read_own_rows(own):
            columns = choose_columns(where, list(row), config)
            for setting, column in configured.items():
                if column not in columns.names and not config.mix:
                    raise UserError(f"{setting} is {column}, but {where} is made from {', '.join(columns.names)}: leave one out")
            yield build_row([row[name] for name in columns.names], columns, where, mix_entry, **fields)

    item = build_own_input(own, read, columns=None, num_rows=config.num_rows, mix_entry=mix_entry)
    return dataclasses.replace(item, digest=f"{item.digest} {sorted(configured.items())}")


def _read_examples(read_cells: Callable[[], Iterator[Cells]], columns: Columns, label: str, mix_entry: int) -> Iterator[Row]:
    for number, cells in enumerate(read_cells(), start=1):
        yield build_row(cells, columns, f"{label}, row {number}", mix_entry)


def _build_docstrings_input(mix_entry: int) -> RowInput:
    from toolkit.data.sources.stdlib import identify_functions, read_functions

    columns = Columns("pair", ("prompt", "completion"))

    def read() -> Iterator[Row]:
        for number, row in enumerate(read_functions(), start=1):
            own = {"group": row["group"], "held_out": row["split"] == "eval", "lead_text": row["lead_text"]}
            yield build_row((row["prompt"], row["completion"]), columns, f"docstrings, row {number}", mix_entry, **own)

    return RowInput(label="docstrings", columns=None, digest=identify_functions(), read=read, mix_entry=mix_entry)


def _build_stdlib_input(mix_entry: int) -> RowInput:
    from toolkit.data.sources.stdlib import identify_modules, read_modules

    columns = Columns("text", ("text",))

    def read() -> Iterator[Row]:
        for number, row in enumerate(read_modules(), start=1):
            own = {"group": row["group"], "held_out": row["split"] == "eval"}
            yield build_row((row["text"],), columns, f"stdlib, row {number}", mix_entry, **own)

    return RowInput(label="stdlib", columns=None, digest=identify_modules(), read=read, mix_entry=mix_entry)
