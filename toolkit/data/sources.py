"""`data.source` → rows of text, checked, split into training and evaluation, cached as Arrow files.

Four kinds of source: docstrings of the running interpreter, WikiHow's files, plain csv / jsonl / parquet files, and datasets of
the hub. Each yields rows to the one pass in `rows.py`; what the rows depend on is hashed first, so that a second run reads the
cache instead of a 600 MB file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import DataConfig
from toolkit.data import files, wikihow
from toolkit.data.rows import InputReport, Row, RowInput, write_rows
from toolkit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

READER_VERSION = 1
"""Goes into the fingerprint: raise it when the same file would give other rows than before."""

FILE_READERS: dict[str, Callable[[Path, str, str], Iterator[Row]]] = {
    "csv": files.read_csv,
    "jsonl": files.read_jsonl,
    "parquet": files.read_parquet,
    "wikihow": lambda path, source_column, target_column: wikihow.read_wikihow(path),
}
NAMED_SOURCES = ("docstrings", *FILE_READERS)


@dataclass(frozen=True)
class TextRows:
    """Rows of one source as text, split for training and evaluation."""

    train: Dataset
    """Columns: `row_id` int64 (position in the source, evaluation files first; unique over both sides), `source`, `target`
    and `lead_text`, the text whose first sentence is the lead baseline."""
    evaluation: Dataset
    """The same columns. Empty where `data.eval_fraction` is 0 and there are no evaluation files."""
    fingerprint: str
    """Hex sha256 of everything that decides the rows: contents, settings that matter, reader version. No paths, no times."""
    remarks: list[str]
    """Sentences to tell the user."""


def load_text_rows(config: DataConfig) -> TextRows:
    """Read, check and split the rows of `data.source`. On one process of a node; no collectives.

    Rows are held out by a hash of their group (WikiHow: the article's title; else the source text), so that no group is on both
    sides, whatever the order of the rows. `data.eval_files` replace that, and training rows that they hold are left out.
    `docstrings` brings its own split: `data.eval_fraction` does not apply to it. `data.prefix` is not applied here.

    Raises:
        UserError: settings that do not go together; a file or dataset that is missing, broken, without the columns or without
            usable rows; a cell that is not text.
    """
    _check_settings(config)
    inputs = _build_inputs(config)
    fingerprint = _hash_inputs(config, inputs)
    folder = cache_folder(config) / "rows" / fingerprint
    if not folder.is_dir():
        _write_cache(config, inputs, folder)
    return _load_cache(config, inputs, folder)


def cache_folder(config: DataConfig) -> Path:
    """Where rows (and whatever is made of them) are cached."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "toolkit"


def _check_settings(config: DataConfig) -> None:
    """Refuse settings that the source would silently ignore, and files that are not given."""
    if config.source in FILE_READERS and not config.files:
        raise UserError(f"data.source {config.source} needs data.files")
    if config.source not in FILE_READERS:
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
    """Names of the source and the target column."""
    if config.source == "wikihow":
        return wikihow.COLUMNS[0], wikihow.COLUMNS[1]
    return config.source_column or "source", config.target_column or "target"


def _build_inputs(config: DataConfig) -> list[RowInput]:
    """The inputs of the source, evaluation files first."""
    if config.source == "docstrings":
        return [_build_docstrings_input()]
    if config.source not in FILE_READERS:
        return [_build_hub_input(config)]
    read = FILE_READERS[config.source]
    return [
        RowInput(
            label=str(path),
            columns=_columns(config),
            digest=files.hash_file(path, is_text=config.source != "parquet"),
            read=partial(read, path, *_columns(config)),
            is_eval_file=setting == "data.eval_files",
        )
        for setting, patterns in (("data.eval_files", config.eval_files or []), ("data.files", config.files or []))
        for path in files.find_files(patterns, setting)
    ]


def _build_docstrings_input() -> RowInput:
    from toolkit.data.docstrings import identify_docstrings, read_docstrings

    def read() -> Iterator[Row]:
        for row in read_docstrings():
            yield Row(
                row["source"], row["target"], group=row["group"], held_out=row["split"] == "eval", lead_text=row["lead_text"]
            )

    return RowInput(label="docstrings", columns=("source", "target"), digest=identify_docstrings(), read=read)


def _build_hub_input(config: DataConfig) -> RowInput:
    from toolkit.data.hub import load_hub_dataset, read_hub_rows

    dataset = load_hub_dataset(config.source, config.hub_subset, config.hub_split, other_sources=NAMED_SOURCES)
    read = partial(read_hub_rows, dataset, config.source, *_columns(config))
    # datasets' own fingerprint is made of paths and times; only the rows themselves are the same on every machine.
    return RowInput(label=config.source, columns=_columns(config), digest=_hash_rows(islice(read(), config.num_rows)), read=read)


def _hash_rows(rows: Iterable[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(tuple(row)).encode())
    return digest.hexdigest()


def _hash_inputs(config: DataConfig, inputs: list[RowInput]) -> str:
    identity = {
        "reader_version": READER_VERSION,
        "reader": config.source if config.source in NAMED_SOURCES else "hub",
        "columns": _columns(config),
        "num_rows": config.num_rows,
        "eval_fraction": config.eval_fraction if _splits_by_hash(config) else None,
        "inputs": [(item.is_eval_file, item.digest) for item in inputs],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _splits_by_hash(config: DataConfig) -> bool:
    return config.source != "docstrings" and not config.eval_files


def _write_cache(config: DataConfig, inputs: list[RowInput], folder: Path) -> None:
    """Make `folder` with both sides and a report of each input: beside it first, then by one rename."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
    except OSError as error:
        raise UserError(f"the cache folder {folder.parent} cannot be written ({error.strerror}): set data.cache_dir") from None
    with beside:
        unfinished = Path(beside.name) / "rows"
        unfinished.mkdir()
        reports = write_rows(
            inputs,
            unfinished,
            eval_fraction=config.eval_fraction,
            num_rows=config.num_rows,
            drop_repeats=config.source == "wikihow",
        )
        (unfinished / "reports.json").write_text(json.dumps([asdict(report) for report in reports]))
        try:
            unfinished.rename(folder)
        except OSError:
            # Another node on the same file system was faster; what it wrote is the same.
            if not folder.is_dir():
                raise


def _load_cache(config: DataConfig, inputs: list[RowInput], folder: Path) -> TextRows:
    from datasets import Dataset

    train = Dataset.from_file(str(folder / "train.arrow"))
    evaluation = Dataset.from_file(str(folder / "evaluation.arrow"))
    # Remarks are put into words now: a file may have another name than when it was cached.
    reports = [InputReport(**report) for report in json.loads((folder / "reports.json").read_text())]
    remarks = [sentence for item, report in zip(inputs, reports, strict=True) for sentence in report.sentences(item.label)]
    if _splits_by_hash(config) and config.eval_fraction > 0 and len(evaluation) == 0:
        share = f"data.eval_fraction {config.eval_fraction}"
        remarks.append(f"{share} holds out none of the {len(train)} rows: there is nothing to evaluate on")
    return TextRows(train=train, evaluation=evaluation, fingerprint=folder.name, remarks=remarks)
