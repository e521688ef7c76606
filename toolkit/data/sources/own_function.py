"""A source of one's own: `data.source: my_rows.py:load_rows` names a Python file and a function in it that gives rows as dicts;
or Python code gives datasets to a run.

The function gets the run's data section. The file runs only because the user named it, and only on the first process of each
node. It is compiled from the bytes that are hashed, so that no outdated `.pyc` runs in its place.
Datasets are written as parquet files to the cache, and the run reads those. So columns, splits, caches, fingerprints and resumes
are those of files, and the run's `config.yaml` trains the same rows again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.load import RecipeConfig
from toolkit.config.paths import split_own_source
from toolkit.data.cache_folders import cache_folder
from toolkit.data.sources.files import find_files, hash_file
from toolkit.data.sources.hub import read_hub_rows
from toolkit.data.sources.row import check_text
from toolkit.distributed.comm import gather_objects, on_all_ranks
from toolkit.errors import UserError, refusal_named
from toolkit.files import durable
from toolkit.variables import local_rank

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("toolkit")

_MAX_REASON_CHARACTERS = 300


def load_own_source(config: DataConfig | LLMDataConfig, setting: str) -> tuple[Callable[[], Iterator[dict[str, Any]]], str, bool]:
    """Run the file that `config.source` names, find its function, and call its `identify`. No such file or function, or an error
    in the file, is a `UserError`, which begins with `setting`: `data`, or `data.mix[i]` for the data section with the source and
    the files of an entry.

    Returns:
        What yields the rows of the function, which gets `config` with `files` and `eval_files` as lists of paths that exist; hex
        sha256 of the file, those beside it that it imports, the function's name, the files in `config`, and what `identify`
        returned; whether the file has `identify`, so that the rows need not be hashed.
    """
    label = config.source or ""
    file, name = split_own_source(label) or ("", "")
    if not name:
        raise UserError(f"{setting}.source {label} names no function: write it behind the file, as in {file}:load_rows")
    (path,) = find_files(file, f"{setting}.source")
    digests = [hash_file(path, is_text=True), name]
    found = {key: find_files(getattr(config, key) or [], f"{setting}.{key}") for key in ("files", "eval_files")}
    digests += [f"{key} {hash_file(path, is_text=False)}" for key, paths in found.items() for path in paths]
    files, eval_files = ([str(path) for path in paths] for paths in found.values())
    config = dataclasses.replace(config, files=files, eval_files=eval_files)

    module, beside = run_file(path, label)
    digests += [hash_file(file, is_text=False) for file in beside]
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise UserError(f"{label}: the file has no function {name}: name one that it defines ({', '.join(defined) or 'none'})")
    identify = getattr(module, "identify", None)  # (config) -> str: what decides the rows, at less cost than reading them
    if identify is not None:
        with _errors_of(path, label):
            identity = identify(config)
        check_text(identity, f"{label}: the result of identify")
        digests.append(f"identify {identity}")
    identity = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    return partial(read_own_rows, function, config, path, label), identity, identify is not None


def read_own_rows(function: Callable[[Any], Any], config: Any, path: Path, label: str) -> Iterator[dict[str, Any]]:
    """Call the function and yield its rows, of which each must be a dict; an error in it is a `UserError`."""
    with _errors_of(path, label):
        rows = function(config)
        if isinstance(rows, dict):  # a DatasetDict is one
            raise UserError(
                f"{label} returns a {type(rows).__name__} with the keys {', '.join(map(str, rows))}: return the rows of one of "
                "them, or of all, with a column split (train or eval)"
            )
        datasets: Any = sys.modules.get("datasets")
        if datasets and isinstance(rows, datasets.Dataset) and rows.format["type"] is None:
            rows = read_hub_rows(rows, rows.column_names)  # without the null keys that it gives to structs
        if not hasattr(rows, "__iter__"):
            raise UserError(f"{label} returns {rows!r:.60}, which holds no rows: yield dicts, or return a list or a Dataset")
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                trouble = f"{row!r:.60} is of type {type(row).__name__}, not a dict"
                raise UserError(f"{label}, row {number}: {trouble}: yield {{column: value, ...}}")
            yield row


def read_options(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The optional columns of a row that are given: `group`, `lead_text`, `skip`, and `split` as `held_out`. A wrong value is a
    `UserError`."""
    fields = {name: row[name] for name in ("group", "lead_text", "skip") if row.get(name) is not None}
    for name, value in fields.items():
        check_text(value, f"{where}, column {name}")
    if not fields.get("skip", "with a reason").strip():
        raise UserError(f"{where}, column skip is empty: give the reason to leave the row out, or None to keep it")
    if (split := row.get("split")) is not None:
        if not isinstance(split, str) or split not in ("train", "eval"):
            raise UserError(f"{where}, column split: {split!r:.60} is neither train nor eval: write one of them, or leave it out")
        fields["held_out"] = split == "eval"
    return fields


def run_file(path: Path, label: str) -> tuple[types.ModuleType, list[Path]]:
    """Run the file; return its module, and the files beside it that it imported, before which anything installed comes."""
    content = path.read_bytes()
    # Its own name, which no import statement can hit, in sys.modules: dataclasses look themselves up there.
    module = types.ModuleType(f"{path.stem}-{hashlib.sha256(content).hexdigest()[:12]}")
    module.__file__ = str(path.absolute())
    sys.modules[module.__name__] = module
    before, folder = set(sys.modules), path.absolute().parent
    sys.path.append(str(folder))
    try:
        with _errors_of(path, label):
            exec(compile(content, str(path), "exec"), module.__dict__)
    finally:
        sys.path.remove(str(folder))
        # They are forgotten again: the next file may lie beside other ones of the same names.
        beside = {}
        for name in [name for name in sys.modules if name.partition(".")[0] not in before]:
            file, place = Path(getattr(sys.modules[name], "__file__", None) or "/"), folder / name.partition(".")[0]
            if file == place.with_suffix(".py") or file.is_relative_to(place):
                beside[name] = file
                del sys.modules[name]
    return module, sorted(beside.values())


@contextmanager
def _errors_of(path: Path, label: str) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence with the line of their file."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        message: object = error
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines, message = [error.lineno], error.msg
        where = f"line {lines[-1]} of the file" if lines else "the file"
        reason = " ".join(f"{type(error).__name__}: {message}".split())
        logger.debug(f"{label}: {where} raised", exc_info=True)
        raise UserError(f"{label}: {where} raised {reason[:_MAX_REASON_CHARACTERS].rstrip(': .')}: correct it there") from None


def check_datasets(config: RecipeConfig, train: Any, evaluation: Any) -> RecipeConfig:
    """Check what was given, before anything is written. With datasets, the config gets parquet as its source; `save_datasets`
    adds the files. What is not a `datasets.Dataset` with rows, or rows that the config names too, are a `UserError`."""
    if train is None:
        if evaluation is not None:
            raise UserError("evaluation is a dataset, but train is not given: give both, or name files in data.eval_files")
        if not config.data.source and not config.data.files and not getattr(config.data, "mix", []):
            raise UserError("there are no rows: give finetune a datasets.Dataset as train, or set data.files in the config")
        return config
    import datasets

    for name, dataset in (("train", train), ("evaluation", evaluation)):
        if dataset is not None and not isinstance(dataset, datasets.Dataset):
            keys = f" with the keys {', '.join(map(str, dataset))}: give one of them" if isinstance(dataset, dict) else ""
            remedy = keys or ": give a datasets.Dataset, as from Dataset.from_list(rows)"
            raise UserError(f"{name} is a {type(dataset).__name__}{remedy}")
        if dataset is not None and dataset.format["type"] == "custom":
            raise UserError(f"{name} has a transform, which a run does not keep: apply it by map")
        if dataset is not None and len(dataset) == 0:
            raise UserError(f"{name} has no rows: give a dataset with at least one")
    for name in ("source", "mix", "files", "eval_files", "hub_subset", "hub_eval_split"):
        if getattr(config.data, name, None):
            raise UserError(f"data.{name} is given beside a dataset as train: leave one of them out")
    return _with_data(config, source="parquet")


def save_datasets(config: RecipeConfig, train: Dataset, evaluation: Dataset | None) -> RecipeConfig:
    """Write the datasets of each node's first process to the cache; returns the config that reads them. A file that cannot be
    written, or nodes with different rows, are a `UserError` on every rank. Collective."""
    folder = cache_folder(config.data.cache_dir) / "datasets"
    given = [(name, dataset) for name, dataset in (("train", train), ("evaluation", evaluation)) if dataset is not None]
    names = on_all_ranks(lambda: [_save(*each, folder) for each in given] if local_rank() == 0 else [])
    names, *others = [names for names in gather_objects(names) if names]
    if any(other != names for other in others):
        raise UserError("the nodes have different datasets: seed what is random, and read the same files on each")
    files, *eval_files = [str(folder / name) for name in names]
    return _with_data(config, files=[files], eval_files=eval_files or None)


def _with_data(config: RecipeConfig, **changes: Any) -> RecipeConfig:
    data: Any = dataclasses.replace(config.data, **changes)
    return dataclasses.replace(config, data=data)


def _save(argument: str, dataset: Dataset, folder: Path) -> str:
    """Write `<argument>-<sha256>.parquet` and return this name, which lines and pages show. A file that is there has the same
    content, and is replaced as a whole."""
    import datasets

    datasets.disable_progress_bars()
    with refusal_named(f"the dataset cannot be written to {folder}", "make room there, or set data.cache_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, suffix=".tmp", ignore_cleanup_errors=True) as unfinished:
            file = Path(unfinished, "rows.parquet")
            dataset.to_parquet(file)
            name = f"{argument}-{durable.hash_file(file)}.parquet"
            os.replace(file, folder / name)
    return name
