"""Rows of a hub dataset, or of a local folder that `datasets` can load."""

from __future__ import annotations

import contextlib
import difflib
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.files import Cells, check_columns
from toolkit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_PROBE_TIMEOUT_S = 5


def load_hub_dataset(name: str, subset: str | None, split: str, *, other_sources: tuple[str, ...]) -> Dataset:
    """Load one split, from the local cache where the hub cannot be reached.

    Args:
        name: hub id or local folder.
        other_sources: what else `data.source` may be; the nearest is suggested where `name` is nothing.

    Raises:
        UserError: unknown or unreachable dataset, unknown subset or split, damaged files.
    """
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"data.source {name} is a file: set data.source to csv, jsonl or parquet and data.files to {name}")
    is_folder = path.is_dir()
    if not is_folder and (path.is_absolute() or name.startswith(".")):
        raise UserError(f"data.source {name}: there is no such folder: check the path")
    try:
        with contextlib.nullcontext() if is_folder or _can_reach_hub() else _without_network():
            return datasets.load_dataset(str(path) if is_folder else name, name=subset, split=split)
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


def read_hub_rows(dataset: Dataset, label: str, columns: Sequence[str]) -> Iterator[Cells]:
    """The cells of some columns, row by row.

    Raises:
        UserError: a missing column.
    """
    check_columns(label, dataset.column_names, columns)
    for batch in dataset.select_columns(list(columns)).iter(batch_size=1000):
        yield from zip(*(batch[column] for column in columns), strict=True)


def _can_reach_hub() -> bool:
    """False where the hub's name does not resolve or nothing answers there.

    `datasets` retries for 23 s before it says so. Anything else than these plain failures is left to it to judge.
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
    """Let `datasets` look into its local cache at once, as with HF_HUB_OFFLINE=1, which it reads at import only."""
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
