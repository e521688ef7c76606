"""`data` of a run → its rows as text, split into training and evaluation, and cached.

The hash of everything that they depend on comes first, so that a second run reads the cache and does not parse a 600 MB file
again. Otherwise one pass over the rows of all inputs splits them and writes them to Arrow files. Memory does not grow with the
text, except that of a JSON array: rows are streamed in blocks of bounded size, and at most a few 64-bit hashes are kept per row.
The files are read back memory-mapped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.cache_folders import cache_folder, find_or_build, name_folder
from toolkit.data.rows.example import Example, build_schema, list_cells
from toolkit.data.rows.inputs import RowInput, check_columns_used, describe_readings, list_inputs, read_rows
from toolkit.data.sources.text_files import ROWS_TO_FIND_KEYS_IN
from toolkit.distributed.progress import Phase
from toolkit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

    from toolkit.objectives.objective import Objective

READER_VERSION = 8
"""Part of the fingerprint. Raise it when the same source would give different rows, a different report or a different file
layout."""
_ROWS_PER_BLOCK, _CHARACTERS_PER_BLOCK = 1000, 2**23
_NUM_FIRST_ROWS_NAMED = 3


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
    readings: list[str]
    """How the inputs are read, and from which columns, as sentences to print."""
    repeats: list[str]
    """Those of `remarks` about duplicate rows."""
    inputs: list[RowInput]
    """Those of `origins`."""
    message_keys: dict[str, int]
    """How many messages of chats have each key."""


def load_rows(objective: Objective, config: DataConfig | LLMDataConfig, *, has_chat_template: bool = False) -> TextRows:
    """Load the rows of `data.source`, or of every entry of `data.mix`; read, check and split them first if they are not cached.

    A hash of a row's group (the prompt, the source, the text, or all of a chat before its first answer) decides its split, so
    that no group is in both splits, whatever the order of the rows. `data.eval_files` or a dataset's `hub_eval_split` replaces
    this: training rows that equal one of theirs are left out, and those that only share a prompt with one are counted. A function
    of the user's may give each row its group and its split.

    For one process per node; no collectives. Where there `has_chat_template`, rows of Alpaca's columns become chats.

    Raises:
        UserError: settings that contradict each other; a file or dataset that is missing, broken, without usable columns or
            rows; a cell that is not text, or a text of over 2 GiB; a malformed conversation; no row left to train on; a
            configured column that no row used; the cache cannot be written or read.
    """
    inputs = list_inputs(objective, config, has_chat_template=has_chat_template)
    eval_fraction = None if any(item.is_eval_file for item in inputs) else config.eval_fraction
    identity = {
        "reader_version": READER_VERSION,
        "num_rows": config.num_rows,
        "eval_fraction": eval_fraction,
        "inputs": [(item.is_eval_file, item.mix_entry, item.digest) for item in inputs],
    }
    folder = cache_folder(config.cache_dir) / "rows" / name_folder(identity)
    about = find_or_build("the cache of rows", folder, write_rows, config, inputs, eval_fraction)
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
    found = about["repeats"], inputs, about["message_keys"]
    return TextRows(train, evaluation, folder.name, remarks, origins, describe_readings(inputs), *found)


def write_rows(
    config: DataConfig | LLMDataConfig, inputs: list[RowInput], eval_fraction: float | None, folder: Path
) -> dict[str, Any]:
    """Write `train.arrow` and `evaluation.arrow` into `folder`; returns one report per input (`inputs`), the sentences about
    duplicate rows (`repeats`), and `message_keys`. A row's id is its position over all inputs.

    Args:
        config: its `num_rows` limits the rows read from one mix entry, without evaluation files.
        inputs: evaluation files first, so that their rows are known before the training rows are read.
        eval_fraction: share of the groups that a hash puts into the evaluation split; None if the inputs define the split.
    """
    import pyarrow as pa

    num_rows = config.num_rows
    reports = [InputReport() for _ in inputs]
    named_by = "data.eval_files" if config.eval_files else "data.hub_eval_split"
    splitter = Splitter(eval_fraction, named_by)
    num_read: Counter[int] = Counter()
    message_keys: Counter[str] = Counter()
    row_id = 0
    with (
        closing(_RowFile(folder / "train.arrow")) as train,
        closing(_RowFile(folder / "evaluation.arrow")) as evaluation,
        Phase("reading the data", None, "rows") as reading,
    ):
        for item, report in zip(inputs, reports, strict=True):
            limit = None if item.is_eval_file or num_rows is None else num_rows - num_read[item.mix_entry]
            if limit == 0:
                continue
            for row in islice(read_rows(item), limit):
                reading.add(1)
                report.num_rows += 1
                is_held_out = None if isinstance(row, str) else splitter.holds_out(row, is_eval_row=item.is_eval_file)
                if isinstance(row, str) or is_held_out is None:
                    report.skip(row if isinstance(row, str) else f"that equal a row of {named_by}")
                else:
                    message_keys.update(chain.from_iterable(row.messages or ()))
                    try:
                        (evaluation if is_held_out else train).add([row_id, item.mix_entry, *list_cells(row)])
                    except pa.ArrowCapacityError:
                        raise UserError(f"{item.label}, row {report.num_rows}: a text of over 2 GiB: split it") from None
                row_id += 1
            if report.num_rows == 0:
                raise UserError(f"{item.label} holds no rows: give a source with at least one")
            report.late_keys = item.late_keys
            num_read[item.mix_entry] += 0 if item.is_eval_file else report.num_rows
    _check_something_is_left(inputs, reports, train.num_rows)
    check_columns_used(config, inputs)
    return {"inputs": [*map(asdict, reports)], "repeats": splitter.sentences(), "message_keys": message_keys}


@dataclass
class InputReport:
    """Counts of the rows read from one input and left out of it; stored in the cache as JSON."""

    num_rows: int = 0
    num_skipped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    first_skipped: dict[str, list[int]] = field(default_factory=dict)
    """The first few row numbers (1-based), by reason."""
    late_keys: dict[str, int] = field(default_factory=dict)
    """Of `RowInput`."""

    def skip(self, reason: str) -> None:
        """Count the most recent row as left out."""
        self.num_skipped[reason] = self.num_skipped.get(reason, 0) + 1
        first = self.first_skipped.setdefault(reason, [])
        if len(first) < _NUM_FIRST_ROWS_NAMED:
            first.append(self.num_rows)

    def sentences(self, label: str) -> list[str]:
        """For each reason, "skipped 3 of 120 rows of rows.csv with an empty target (first: rows 17, 40, 77)"; then late keys."""
        sentences = []
        for reason, count in self.num_skipped.items():
            numbers = ", ".join(str(number) for number in self.first_skipped[reason])
            where = f"row {numbers}" if count == 1 else f"first: rows {numbers}"
            sentences.append(f"skipped {count} of {self.num_rows} rows of {label} {reason} ({where})")
        if self.late_keys:
            keys = ", ".join(f"{key} (row {row:,})" for key, row in self.late_keys.items())
            sentences.append(f"{label} has keys after its first {ROWS_TO_FIND_KEYS_IN:,} rows that are not read: {keys}")
        return sentences


class Splitter:
    """Decides the split of rows, and counts duplicates, with a 64-bit hash per row.

    Among two million rows, the probability that two different ones share a 64-bit hash is 1e-7.
    """

    def __init__(self, eval_fraction: float | None, named_by: str = "") -> None:
        """`eval_fraction` is None if the rows of evaluation files, which come first, are the evaluation split; `named_by` is the
        setting that names these."""
        self._eval_fraction, self._named_by = eval_fraction, named_by
        self._train_hashes, self._held_out_hashes = array("Q"), array("Q")
        self._eval_rows: set[int] = set()
        self._eval_openings: set[int] = set()
        self._num_sharing = 0

    def holds_out(self, row: Example, *, is_eval_row: bool) -> bool | None:
        """Whether a row is for evaluation, the same for all rows of a group, in any order. None: it equals an evaluation row."""
        row_hash = hash64(row.content)
        is_held_out = is_eval_row
        if is_eval_row:
            self._eval_rows.add(row_hash)
            self._eval_openings.add(hash64(row.opening))
        elif self._eval_fraction is None and row_hash in self._eval_rows:
            return None
        elif self._eval_fraction is None:
            self._num_sharing += hash64(row.opening) in self._eval_openings
        elif row.held_out is not None:
            is_held_out = row.held_out
        else:
            is_held_out = hash64(row.opening if row.group is None else row.group) < self._eval_fraction * 2**64
        (self._held_out_hashes if is_held_out else self._train_hashes).append(row_hash)
        return is_held_out

    def sentences(self) -> list[str]:
        """What to report about duplicates; empty if all rows differ."""
        train, held_out = np.asarray(self._train_hashes), np.asarray(self._held_out_hashes)
        sentences = []
        if num_repeats := len(train) - len(np.unique(train)):
            sentences.append(f"training rows that repeat an earlier row exactly: {num_repeats} of {len(train)}, which are kept")
        if num_shared := int(np.isin(held_out, train).sum()):
            sentences.append(
                f"held-out rows that are training rows too: {num_shared} of {len(held_out)}, which say little about new rows"
            )
        if self._num_sharing:
            shared = f"{self._num_sharing} of {len(train)}"
            sentences.append(
                f"training rows with the prompt of a row of {self._named_by}, and something else: {shared}, which are kept"
            )
        return sentences


def hash64(text: str) -> int:
    """By which rows are equal, and held out."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _check_something_is_left(inputs: list[RowInput], reports: list[InputReport], num_training_rows: int) -> None:
    """Refuse evaluation files or a source without any usable row."""
    for is_eval_file in (True, False):
        chosen = [(item, report) for item, report in zip(inputs, reports, strict=True) if item.is_eval_file == is_eval_file]
        num_read = sum(report.num_rows for _, report in chosen)
        num_skipped = sum(sum(report.num_skipped.values()) for _, report in chosen)
        if num_read and num_skipped == num_read:
            sentences = [sentence for item, report in chosen for sentence in report.sentences(item.label)]
            raise UserError(f"none of the {num_read} rows can be used: {'; '.join(sentences)}; give a source with usable rows")
    if num_training_rows == 0:
        raise UserError("all rows are held out, none is left to train on: lower data.eval_fraction or give more rows")


class _RowFile:
    """An Arrow stream, written in blocks that are bounded in rows and characters; `close` writes the last one."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.num_rows = 0
        self._schema = build_schema()
        self._block: list[list[Any]] = []
        self._num_characters = 0
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def add(self, cells: list[Any]) -> None:
        self._block.append(cells)
        self.num_rows += 1
        self._num_characters += sum(len(cell) for cell in cells if isinstance(cell, str))
        if len(self._block) == _ROWS_PER_BLOCK or self._num_characters > _CHARACTERS_PER_BLOCK:
            self._write_block()

    def close(self) -> None:
        self._write_block()
        self._stream.close()
        self._file.close()

    def _write_block(self) -> None:
        import pyarrow as pa

        block, self._block, self._num_characters = self._block, [], 0  # first, because `close` follows an error
        if block:
            by_column = zip(*block, strict=True)
            arrays = [pa.array(cells, field.type) for cells, field in zip(by_column, self._schema, strict=True)]
            self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
