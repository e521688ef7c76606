"""`data` of a run → its rows as text, split into training and evaluation, and cached.

They are Arrow files in a folder named by a hash of everything that they depend on. The hash comes first, so that a second run
reads the cache and does not parse a 600 MB file again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.cache_folders import cache_folder, find_or_build, name_folder
from toolkit.data.rows.inputs import list_inputs
from toolkit.data.rows.split import InputReport, write_rows

if TYPE_CHECKING:
    from datasets import Dataset

READER_VERSION = 4
"""Part of the fingerprint. Raise it when the same source would give different rows, a different report or a different file
layout."""


@dataclass(frozen=True)
class TextRows:
    """The rows of all inputs as text, split into training and evaluation."""

    train: Dataset
    """The columns of `build_schema`."""
    evaluation: Dataset
    """The same columns. Empty if `data.eval_fraction` is 0 and there are no evaluation files."""
    fingerprint: str
    """Hex sha256 of everything that decides the rows: contents, relevant settings, reader version. No paths, no times."""
    remarks: list[str]
    """Sentences to print for the user."""
    origins: list[tuple[str, int]]
    """The label of each input and the number of rows read from it; row ids count through the inputs."""


def load_rows(config: DataConfig | LLMDataConfig) -> TextRows:
    """Load the rows of `data.source`, or of every entry of `data.mix`; read, check and split them first if they are not cached.

    A hash of a row's group (the prompt, the source, the text, or the first user message) decides its split, so that no group is
    in both splits, whatever the order of the rows. `data.eval_files` replaces this, and training rows that are in them are left
    out. A function of the user's may give each row its group and its split.

    For one process per node; no collectives.

    Raises:
        UserError: settings that contradict each other; a file or dataset that is missing, broken, without usable columns or
            rows; a cell that is not text; a malformed conversation; the cache cannot be written or read.
    """
    inputs = list_inputs(config)
    eval_fraction = None if any(item.is_eval_file for item in inputs) else config.eval_fraction
    identity = {
        "reader_version": READER_VERSION,
        "num_rows": config.num_rows,
        "eval_fraction": eval_fraction,
        "inputs": [(item.is_eval_file, item.mix_entry, item.digest) for item in inputs],
    }
    folder = cache_folder(config.cache_dir) / "rows" / name_folder(identity)
    about = find_or_build("the cache of rows", folder, write_rows, inputs, eval_fraction, config.num_rows)
    # Remarks are written now, not cached: a file may have been renamed since.
    from datasets import Dataset

    train, evaluation = (Dataset.from_file(str(folder / f"{name}.arrow")) for name in ("train", "evaluation"))
    reports = [InputReport(**report) for report in about["inputs"]]
    remarks = [sentence for item, report in zip(inputs, reports, strict=True) for sentence in report.sentences(item.label)]
    remarks += about["repeats"]
    if eval_fraction and len(evaluation) == 0:
        share = f"data.eval_fraction {eval_fraction}"
        remarks.append(f"{share} holds out none of the {len(train)} rows: there is nothing to evaluate on")
    origins = [(item.label, report.num_rows) for item, report in zip(inputs, reports, strict=True)]
    return TextRows(train, evaluation, folder.name, remarks, origins)
