"""Datasets that Python code gives to a run. They are written as parquet files to the cache, and the run reads those.

So columns, splits, caches, fingerprints and resumes are those of files, and the run's `config.yaml` trains the same rows again.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.load import RecipeConfig
from toolkit.data.cache_folders import cache_folder
from toolkit.distributed.comm import gather_objects, on_all_ranks
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import hash_file
from toolkit.variables import local_rank

if TYPE_CHECKING:
    from datasets import Dataset


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
            name = f"{argument}-{hash_file(file)}.parquet"
            os.replace(file, folder / name)
    return name
