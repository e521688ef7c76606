"""Rows of a hub dataset, and the files of a local folder that `datasets` can load.

`datasets` also accepts the names of its readers (`text`, `json`, `imagefolder`, …) as datasets; without files, such a reader
reads every file of the working directory. And a dataset's README may name files anywhere on this machine or the network.
Therefore the name and a folder's README are checked before `datasets` sees them, and the list of files before they are read.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml

from toolkit.data.sources.files import name_kind, outer_names, read_batches
from toolkit.data.sources.row import count_rows_at_once
from toolkit.data.sources.text_files import Cells
from toolkit.errors import UserError, first_of, one_line
from toolkit.files.durable import refuse_pointers
from toolkit.private import private

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_NUM_NAMES = 4
_NO_READER_SETTINGS = {"data_files", "data_dir", "default", "description", "version", "features", "drop_labels"}
"""What a README may say of a subset that does not change how its files are read."""


def check_hub_name(name: str, setting: str, other_sources: tuple[str, ...]) -> None:
    """Refuse an empty name, or that of a `datasets` reader in upper or lower case, even if a folder has it, by a `UserError` with
    the config field, `setting`, and its other values, `other_sources`."""
    known = ", ".join(other_sources)
    if not name.strip():
        raise UserError(f"{setting} is empty: give one of {known}, a hub id, or a folder")
    if name.casefold() in {*other_sources, *private("_PACKAGED_DATASETS_MODULES")}:
        remedy = f"give one of {known}, a hub id as in user/{name}, or ./{name} for a folder"
        raise UserError(f"{setting} {name} is a kind of file, not a dataset: {remedy}")


def load_hub_dataset(name: str, subset: str | None, split: str, *, other_sources: tuple[str, ...]) -> Dataset:
    """Load one split of a hub id or local folder; from the local cache if the hub cannot be reached. An unknown or unreachable
    dataset, an unknown subset or split, damaged files, and files outside of the dataset are a `UserError`, which may name the
    `other_sources`."""
    with _open_builder(name, subset, split, other_sources) as builder:
        if Path(name).expanduser().is_dir():
            refuse_pointers(Path(file) for files in (builder.config.data_files or {}).values() for file in files)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


def list_folder(name: str, subset: str | None, split: str, *, other_sources: tuple[str, ...]) -> tuple[list[Path], str]:
    """The files of a local folder's split, for the readers of `data.files`, and a sentence on what they are and what is left out.

    No files if only `datasets` can read them: of other kinds, or with a README that says how. Nothing if `name` is not a folder.
    Arguments and errors are as in `load_hub_dataset`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [], ""
    if saved := _list_saved(folder, name, split):
        return saved, f"{name}: split {split} is {_name_files([file.relative_to(folder) for file in saved])}, by save_to_disk"
    with _open_builder(name, subset, split, other_sources) as builder:
        home = folder.resolve()
        splits = {str(key): [Path(file).relative_to(home) for file in files] for key, files in builder.config.data_files.items()}
        settings = _read_subsets(folder, name).get(builder.config.name, {})
    files = splits.get(split)
    if not files:
        found = " and ".join(f"{other} ({_name_files(paths)})" for other, paths in splits.items())
        origin = "by its README, else by the names of files and folders"
        remedy = "set data.hub_split or data.hub_eval_split, or name files in data.files"
        raise UserError(f"data.source {name} has no split {split}, but {found}, {origin}: {remedy}")
    of_split = {file: f" (split {other})" for other, paths in splits.items() for file in paths}
    read = set(files)
    # Not the dataset's own remarks; hidden files come last; a linked folder is not entered and stands for its files.
    others = (file.relative_to(home) for file in home.rglob("*") if file.is_symlink() or not file.is_dir())
    left_out = [file for file in others if file not in read and file.name not in private("FILES_TO_IGNORE")]
    left_out.sort(key=lambda file: (any(part.startswith(".") for part in file.parts), file))
    tables = [file for file in left_out if file not in of_split and name_kind(file) not in (None, "txt")]
    if tables and all(name_kind(file) == "txt" for file in files):  # more licences and notes than data: `datasets` reads those
        raise UserError(f"data.source {name} holds {_name_files(files)} and {_name_files(tables)}: name files in data.files")
    sentence = f"{name}: split {split} is {_name_files(files)}; left out: {_name_files(left_out, of_split)}"
    is_ours = settings.keys() <= _NO_READER_SETTINGS and all(map(name_kind, files))
    return [folder / file for file in files] if is_ours else [], sentence


def _list_saved(folder: Path, name: str, split: str) -> list[Path]:
    """The Arrow files of a split in a folder of `save_to_disk`, in their order; none if it is another folder."""

    def read(file: Path, key: str) -> Any:
        about = None
        with contextlib.suppress(OSError, ValueError):  # files of that name with rows
            about = json.loads(file.read_text(encoding="utf-8"))
        return about.get(key) if isinstance(about, dict) else None

    splits = read(folder / "dataset_dict.json", "splits")
    if splits and split not in splits:
        raise UserError(f"data.source {name} has no split {split}, but {' and '.join(splits)}: set data.hub_split to one of them")
    home = folder / split if splits else folder
    if read(home / "state.json", "_indices_data_files"):
        raise UserError(f"data.source {name} is a selection of its files' rows: save it again by this version of datasets")
    files = [home / about["filename"] for about in read(home / "state.json", "_data_files") or []]
    for file in files:
        check_inside(name, folder, file)
    return files


@contextlib.contextmanager
def _open_builder(name: str, subset: str | None, split: str, other_sources: tuple[str, ...]) -> Iterator[DatasetBuilder]:
    """Yield the builder of a dataset whose files are all its own, and turn what is raised with it into a `UserError`."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    check_hub_name(name, "data.source", other_sources)

    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"data.source {name} is a file: give it in data.files, and leave data.source out")
    is_folder = path.is_dir()
    if not is_folder and (path.is_absolute() or name.startswith(".")):
        raise UserError(f"data.source {name}: there is no such folder: check the path")
    offline = mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True)  # HF_HUB_OFFLINE=1 would be read only at its import
    try:
        with offline if is_folder else contextlib.nullcontext():
            if is_folder:
                _read_subsets(path, name)  # before `datasets` looks for the files that it names
            # The path is absolute, because `datasets` would turn `./text` into `text`.
            builder = datasets.load_dataset_builder(str(path.resolve()) if is_folder else name, name=subset)
            for files in (builder.config.data_files or {}).values():
                files[:] = dict.fromkeys(files)  # `datasets` lists a file twice whose name and folder both name the split
            _check_files(builder, name, path if is_folder else None)
            yield builder
    except UserError:
        raise
    except (ConnectionError, DatasetNotFoundError) as error:
        is_away = isinstance(error, ConnectionError)
        where = "not in the local cache, and the hub cannot be reached" if is_away else "no dataset that the hub shows you"
        known = ", ".join(other_sources)
        raise UserError(f"data.source {name} is not one of {known}, not a local folder and {where}: check the name") from None
    # `datasets` does not check the types of what a README says, and leaves files to libraries that raise what they will.
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()).partition(" with any supported extension")[0].rstrip(".") or type(cause).__name__
        raise UserError(f"data.source {name} (subset {subset}, split {split}) could not be loaded: {reason}") from None


def read_hub_rows(dataset: Dataset, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns, row by row, as those of a parquet file."""
    batch_size = count_rows_at_once(len(dataset), dataset.data.nbytes)
    columns = outer_names(dataset.features.arrow_schema, columns)
    batches = dataset.select_columns(columns).with_format("arrow").iter(batch_size=batch_size)
    yield from read_batches(f"the dataset {dataset.info.dataset_name}", batches, columns)


def check_inside(name: str, folder: Path, place: Path | str) -> None:
    """Raise a `UserError` for a file outside of a folder, by name or by a link; the hub's cache links `snapshots` to `blobs`."""
    real, home = Path(place).resolve(), folder.expanduser().resolve()
    blobs = [parent.parents[1] / "blobs" for parent in (home, *home.parents) if parent.parent.name == "snapshots"]
    if "://" in str(place) or not any(real.is_relative_to(root) for root in (home, *blobs)):
        shown = place if "://" in str(place) else real
        raise UserError(f"data.source {name} holds a link out of it or names a file there, {shown}: give that in data.files")


def _read_subsets(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """What a folder's README says of each subset, read as by `datasets` (load.py, line 416). Refuses names that lead out."""
    from huggingface_hub import DatasetCard, DatasetCardData

    readme, more = folder / "README.md", folder / ".huggingface.yaml"
    card = DatasetCard.load(readme).data.to_dict() if readme.is_file() else {}
    card |= (yaml.safe_load(more.read_text(encoding="utf-8")) or {}) if more.is_file() else {}
    subsets = private("MetadataConfigs").from_dataset_card_data(DatasetCardData(**card))
    for settings in subsets.values():
        patterns = private("sanitize_patterns")(settings.get("data_files") or [])
        for given in (settings.get("data_dir") or ".", *(pattern for some in patterns.values() for pattern in some)):
            if ":" in given or f"{posixpath.normpath(given)}/".startswith(("/", "../")):  # a colon follows fsspec's protocols
                raise UserError(f"data.source {name} names a file outside of it in its README, {given}: give that in data.files")
    return subsets


def _check_files(builder: DatasetBuilder, name: str, folder: Path | None) -> None:
    """Refuse files outside of the dataset's own folder, or of its repository on the hub, by a `UserError` with the first."""
    repository, at, _ = str(builder.base_path).casefold().partition("@")  # a bucket has no revision
    for file in (file for files in (builder.config.data_files or {}).values() for file in files):
        place = file.rpartition("::")[2]  # for a member of an archive, the archive
        if folder is not None:
            check_inside(name, folder, place)
        elif not place.casefold().startswith(repository + (at or "/")):
            raise UserError(f"data.source {name} names a file outside of it in its README, {place}: give that in data.files")


def _name_files(files: Sequence[Path], remarks: dict[Path, str] | None = None) -> str:
    return one_line(first_of((file.as_posix() + (remarks or {}).get(file, "") for file in files), _NUM_NAMES) or "nothing")
