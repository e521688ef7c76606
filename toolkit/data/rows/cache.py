"""The cache of text rows: Arrow files in a folder named by a hash of everything that the rows depend on.

The hash comes first, so that a second run reads the cache and does not parse a 600 MB file again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.cache_folders import find_or_build, name_folder
from toolkit.data.rows.split import InputReport, write_rows
from toolkit.data.sources.row import RowInput

if TYPE_CHECKING:
    from datasets import Dataset

READER_VERSION = 3
"""Part of the fingerprint. Raise it when the same source would give different rows, a different report or a different file
layout."""


@dataclass(frozen=True)
class TextRows:
    """The rows of all inputs as text, split into training and evaluation."""

    train: Dataset
    """Columns: `row_id` int64 (position in the source, evaluation files first; unique over both splits), `source`, `target`
    and `lead_text`, the text whose first sentence is the lead baseline."""
    evaluation: Dataset
    """The same columns. Empty if `data.eval_fraction` is 0 and there are no evaluation files."""
    fingerprint: str
    """Hex sha256 of everything that decides the rows: contents, relevant settings, reader version. No paths, no times."""
    remarks: list[str]
    """Sentences to print for the user."""
    origins: list[tuple[str, int]]
    """The label of each input and the number of rows read from it; row ids count through the inputs."""


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for cached rows and tokens: `data.cache_dir`, or a folder in the Hugging Face cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "toolkit"


def load_rows(
    inputs: list[RowInput],
    cache: Path,
    *,
    identity: dict[str, Any],
    eval_fraction: float | None,
    num_rows: int | None,
    drop_repeats: bool = False,
) -> TextRows:
    """Load the rows of `inputs` from the cache; read them into it first if they are not there.

    For one process per node; no collectives.

    Args:
        identity: everything else that decides the rows, beside the contents of the inputs and these arguments.
        eval_fraction: share of the groups that a hash puts into the evaluation split; None if the inputs define the split.

    Raises:
        UserError: the cache cannot be written or read; anything wrong with the rows, see `write_rows`.
    """
    identity = {
        "reader_version": READER_VERSION,
        **identity,
        "num_rows": num_rows,
        "eval_fraction": eval_fraction,
        "inputs": [(item.is_eval_file, item.digest) for item in inputs],
    }
    folder = cache / "rows" / name_folder(identity)

    def build(unfinished: Path) -> dict[str, Any]:
        reports, repeats = write_rows(
            inputs, unfinished, eval_fraction=eval_fraction or 0.0, num_rows=num_rows, drop_repeats=drop_repeats
        )
        return {"inputs": [asdict(report) for report in reports], "repeats": repeats}

    return _load_cache(inputs, folder, find_or_build("the cache of rows", folder, build), eval_fraction)


def hash_rows(rows: Iterable[Sequence[Any]]) -> str:
    """Hex sha256 of rows that do not come from a file."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(tuple(row)).encode())
    return digest.hexdigest()


def _load_cache(inputs: list[RowInput], folder: Path, about: dict[str, Any], eval_fraction: float | None) -> TextRows:
    from datasets import Dataset

    train = Dataset.from_file(str(folder / "train.arrow"))
    evaluation = Dataset.from_file(str(folder / "evaluation.arrow"))
    # Remarks are written now, not cached: a file may have been renamed since.
    reports = [InputReport(**report) for report in about["inputs"]]
    remarks = [sentence for item, report in zip(inputs, reports, strict=True) for sentence in report.sentences(item.label)]
    remarks += about["repeats"]
    if eval_fraction and len(evaluation) == 0:
        share = f"data.eval_fraction {eval_fraction}"
        remarks.append(f"{share} holds out none of the {len(train)} rows: there is nothing to evaluate on")
    origins = [(item.label, report.num_rows) for item, report in zip(inputs, reports, strict=True)]
    return TextRows(train, evaluation, folder.name, remarks, origins)
