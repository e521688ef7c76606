"""`data.source` of a summarization run → rows of text.

Sources are docstrings of the running interpreter, WikiHow's files, plain csv / jsonl / parquet files, datasets of the hub, and
functions of the user's. Each yields its rows to the single pass in `split.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice, starmap
from pathlib import Path

from toolkit.config.data import DataConfig
from toolkit.config.paths import split_own_source
from toolkit.data.rows.cache import TextRows, cache_folder, hash_rows, load_rows
from toolkit.data.sources.files import READERS, check_columns, find_files, hash_file
from toolkit.data.sources.hub import check_hub_name, load_hub_dataset, read_hub_rows
from toolkit.data.sources.own import build_own_input, load_own_source, read_own_rows
from toolkit.data.sources.row import Row, RowInput
from toolkit.data.sources.wikihow import COLUMNS, read_wikihow
from toolkit.errors import UserError

FILE_SOURCES = (*READERS, "wikihow")
NAMED_SOURCES = ("docstrings", *FILE_SOURCES)


def load_text_rows(config: DataConfig) -> TextRows:
    """Read, check and split the rows of `data.source`. For one process per node; no collectives.

    A hash of a row's group (WikiHow: the article's title; else the source text) decides its split, so that no group is in both
    splits, whatever the order of the rows. `data.eval_files` replaces this, and training rows that are in them are left out.
    `docstrings` has a split of its own: `data.eval_fraction` does not apply to it. `data.prefix` is not applied here.

    Raises:
        UserError: settings that contradict each other; a file or dataset that is missing, broken, without the columns or
            without usable rows; a cell that is not text.
    """
    _check_settings(config)
    is_own = split_own_source(config.source) is not None
    return load_rows(
        _build_inputs(config),
        cache_folder(config.cache_dir),
        identity={"reader": config.source if config.source in NAMED_SOURCES else "hub", "columns": _columns(config)},
        eval_fraction=None if config.source == "docstrings" or (config.eval_files and not is_own) else config.eval_fraction,
        num_rows=config.num_rows,
        drop_repeats=config.source == "wikihow",
    )


def _check_settings(config: DataConfig) -> None:
    """Refuse settings that the source would silently ignore, and a file source without files."""
    is_own = split_own_source(config.source) is not None
    if config.source in FILE_SOURCES and not config.files:
        raise UserError(f"data.source {config.source} needs data.files")
    if config.source not in NAMED_SOURCES and not is_own:
        check_hub_name(config.source, "data.source", NAMED_SOURCES)
    if config.source not in FILE_SOURCES and not is_own:
        for name, value in (("files", config.files), ("eval_files", config.eval_files)):
            if value:
                raise UserError(f"data.{name} is given, but data.source {config.source} reads no files: leave one of them out")
    if config.source in ("docstrings", "wikihow"):
        for name, column in (("source_column", config.source_column), ("target_column", config.target_column)):
            if column:
                raise UserError(f"data.{name} is {column}, but data.source {config.source} knows its columns: leave it out")
    elif len(set(_columns(config))) == 1:
        raise UserError(f"data.source_column and data.target_column are both {_columns(config)[0]}: name two columns")


def _columns(config: DataConfig) -> tuple[str, str]:
    """Names of the source column and the target column."""
    if config.source == "wikihow":
        return COLUMNS[0], COLUMNS[1]
    return config.source_column or "source", config.target_column or "target"


def _build_inputs(config: DataConfig) -> list[RowInput]:
    """The inputs of the source, evaluation files first."""
    if config.source == "docstrings":
        return [_build_docstrings_input()]
    if split_own_source(config.source):
        return [_build_own_input(config)]
    if config.source not in FILE_SOURCES:
        return [_build_hub_input(config)]
    return [
        RowInput(
            label=str(path),
            columns=_columns(config),
            digest=hash_file(path, is_text=config.source != "parquet"),
            read=partial(_read_file, path, config),
            is_eval_file=setting == "data.eval_files",
        )
        for setting, patterns in (("data.eval_files", config.eval_files or []), ("data.files", config.files or []))
        for path in find_files(patterns, setting)
    ]


def _read_file(path: Path, config: DataConfig) -> Iterator[Row]:
    if config.source == "wikihow":
        return read_wikihow(path)
    return starmap(Row, READERS[config.source](path, _columns(config)))


def _build_docstrings_input() -> RowInput:
    from toolkit.data.sources.docstrings import identify_docstrings, read_docstrings

    def read() -> Iterator[Row]:
        for row in read_docstrings():
            yield Row(
                row["source"], row["target"], group=row["group"], held_out=row["split"] == "eval", lead_text=row["lead_text"]
            )

    return RowInput(label="docstrings", columns=("source", "target"), digest=identify_docstrings(), read=read)


def _build_own_input(config: DataConfig) -> RowInput:
    own, columns = load_own_source(config, "data"), _columns(config)

    def read() -> Iterator[Row]:
        for where, row, fields in read_own_rows(own):
            check_columns(where, list(row), columns)
            yield Row(row[columns[0]], row[columns[1]], **fields)

    return build_own_input(own, read, columns=columns, num_rows=config.num_rows)


def _build_hub_input(config: DataConfig) -> RowInput:
    dataset = load_hub_dataset(config.source, config.hub_subset, config.hub_split, other_sources=NAMED_SOURCES)

    def read() -> Iterator[Row]:
        return starmap(Row, read_hub_rows(dataset, config.source, _columns(config)))

    # The fingerprint of `datasets` depends on paths and times; only the rows themselves are the same on every machine.
    return RowInput(label=config.source, columns=_columns(config), digest=hash_rows(islice(read(), config.num_rows)), read=read)
