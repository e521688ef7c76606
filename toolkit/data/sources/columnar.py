"""Readers of parquet and Arrow files, with one block in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.sources.row import count_rows_at_once
from toolkit.data.sources.text_files import GZIP_MAGIC, Cells, Form
from toolkit.errors import UserError


def read_parquet(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of a parquet file, row by row.

    Raises:
        UserError: not parquet, truncated or damaged; text that is not UTF-8, with the row.
    """
    import pyarrow.parquet as pq

    with _errors_of(path, "parquet"), pq.ParquetFile(path) as file:
        num_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        batch_size = count_rows_at_once(file.metadata.num_rows, num_bytes)
        yield from _read_cells(path, file.iter_batches(batch_size=batch_size, columns=list(columns)), columns)


def read_arrow(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of an Arrow file or stream (Feather, the caches of `datasets`), row by row.

    Raises:
        UserError: as `read_parquet`.
    """
    with _errors_of(path, "Arrow"), _open_arrow(path) as (_, batches):
        yield from _read_cells(path, batches, columns)


def list_names(path: Path, kind: str) -> list[str]:
    """The column names of a `parquet` or `arrow` file.

    Raises:
        UserError: the file cannot be read as this kind.
    """
    import pyarrow.parquet as pq

    if kind == "arrow":
        with _errors_of(path, "Arrow"), _open_arrow(path) as (names, _):
            return names
    with _errors_of(path, kind), pq.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[list[str], Iterable[Any]]]:
    """The column names and the batches, memory-mapped."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            batches = (reader.get_batch(place) for place in range(reader.num_record_batches)) if is_file else reader
            yield list(reader.schema.names), batches


def _read_cells(path: Path, batches: Iterable[Any], columns: Sequence[str]) -> Iterator[Cells]:
    number = 0
    try:
        for batch in batches:
            for cells in zip(*(batch[column] for column in columns), strict=True):
                number += 1
                yield {column: cell.as_py() for column, cell in zip(columns, cells, strict=True)}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number}: text that is not valid UTF-8 ({error.reason}): write it as UTF-8") from None


@contextlib.contextmanager
def _errors_of(path: Path, kind: str) -> Iterator[None]:
    import pyarrow as pa

    with path.open("rb") as file:
        if file.read(2) == GZIP_MAGIC:
            raise UserError(f"{path} is gzipped, and {kind} is not read so, because it compresses its columns itself: unpack it")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path} is not a complete {kind} file ({reason.rstrip('.')}): copy or write it again") from None
