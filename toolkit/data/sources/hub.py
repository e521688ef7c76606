"""Rows of a hub dataset, or of a local folder that `datasets` can load.

`datasets` also accepts the names of its readers (`text`, `json`, `imagefolder`, …) as datasets; without files, such a reader
reads every file of the working directory. And a dataset's README may name files anywhere on this machine. Therefore the name is
checked before it is passed to `datasets`, and the list of files before they are read.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.sources.row import count_rows_at_once
from toolkit.data.sources.text_files import Cells
from toolkit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_PROBE_TIMEOUT_S = 5


def check_hub_name(name: str, setting: str, other_sources: tuple[str, ...]) -> None:
    """Refuse the name of a `datasets` reader in upper or lower case, even if a folder has this name.

    Args:
        setting: name of the config field, for messages.
        other_sources: as in `load_hub_dataset`.

    Raises:
        UserError: such a name, or an empty one.
    """
    from datasets.packaged_modules import _EXTENSION_TO_MODULE, _PACKAGED_DATASETS_MODULES

    if not name.strip():
        raise UserError(f"{setting} is empty: give one of {', '.join(other_sources)}, a hub id, or a folder")
    lower, known = name.casefold(), ", ".join(other_sources)
    if lower in other_sources:
        raise UserError(f"{setting} {name} is written {lower}: give that")
    if lower in _PACKAGED_DATASETS_MODULES:
        ours = {_EXTENSION_TO_MODULE.get(f".{source}", (source,))[0]: source for source in other_sources}
        way_out = f"did you mean {ours[lower]}?" if lower in ours else f"give one of {known}, or a hub id as in user/{name}"
        folder = f" (./{name} for the folder)" if Path(name).is_dir() else ""
        raise UserError(f"{setting} {name} is a kind of file, not a dataset: {way_out}{folder}")


def load_hub_dataset(name: str, subset: str | None, split: str, *, other_sources: tuple[str, ...]) -> Dataset:
    """Load one split; from the local cache if the hub cannot be reached.

    Args:
        name: hub id or local folder.
        other_sources: the other values of `data.source`; the error for an unknown `name` suggests the nearest.

    Raises:
        UserError: unknown or unreachable dataset, unknown subset or split, damaged files, files outside of the dataset.
    """
    import datasets

    check_hub_name(name, "data.source", other_sources)

    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"data.source {name} is a file: give it in data.files, and leave data.source out")
    is_folder = path.is_dir()
    if not is_folder and (path.is_absolute() or name.startswith(".")):
        raise UserError(f"data.source {name}: there is no such folder: check the path")
    try:
        with contextlib.nullcontext() if is_folder or _can_reach_hub() else _without_network():
            # The path is absolute, because `datasets` would turn `./text` into `text`.
            builder = datasets.load_dataset_builder(str(path.absolute()) if is_folder else name, name=subset)
            _check_files(builder, name, path.absolute() if is_folder else None)
            builder.download_and_prepare()
            return builder.as_dataset(split=split)
    except UserError:
        raise
    except ConnectionError:
        raise UserError(
            f"data.source {name} is none of {', '.join(other_sources)}, no local folder and not in the local cache, "
            f"and the hub cannot be reached{_suggestion(name, other_sources)}"
        ) from None
    except datasets.exceptions.DatasetNotFoundError:
        raise UserError(
            f"data.source {name} is none of {', '.join(other_sources)}, no local folder and no dataset that the hub "
            f"shows you{_suggestion(name, other_sources)}"
        ) from None
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
        raise UserError(f"data.source {name} (subset {subset}, split {split}) could not be loaded: {reason}") from None


def read_hub_rows(dataset: Dataset, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns, row by row."""
    batch_size = count_rows_at_once(len(dataset), dataset.data.nbytes)
    for batch in dataset.select_columns(list(columns)).iter(batch_size=batch_size):
        for cells in zip(*(batch[column] for column in columns), strict=True):
            yield dict(zip(columns, cells, strict=True))


def _check_files(builder: DatasetBuilder, name: str, folder: Path | None) -> None:
    """Refuse local files outside of the dataset's own folder, which its README can name. Links inside it may lead out.

    Raises:
        UserError: names the first such file.
    """
    for file in (file for files in (builder.config.data_files or {}).values() for file in files):
        place = file.rpartition("::")[2]  # for a member of an archive, the archive
        if place.startswith(("hf://", "https://", "http://")):
            continue
        place = os.path.normpath(place)
        if folder is None or not Path(place).is_relative_to(os.path.normpath(folder)):
            raise UserError(f"data.source {name} names a file outside of it in its README, {place}: give that in data.files")


def _can_reach_hub() -> bool:
    """False if the hub's name does not resolve or nothing answers there.

    `datasets` would retry for 23 s before it fails. All other failures are left to `datasets`.
    """
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode():
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=_PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # a URLError too, but the hub answered
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError | TimeoutError)
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _without_network() -> Iterator[None]:
    """Make `datasets` use only its local cache, as HF_HUB_OFFLINE=1 does, which `datasets` reads only at import."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _suggestion(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ": check the name"
