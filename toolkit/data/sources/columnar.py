"""Readers of parquet and Arrow files, with one block in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.sources.row import count_rows_at_once, list_parts
from toolkit.data.sources.text_files import Cells, Form
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER


def read_columnar(path: Path, columns: Sequence[str], form: Form) -> Iterator[Cells]:
    """Yield the cells of some columns of a parquet or Arrow file (Feather, the caches of `datasets`), row by row; a `UserError`
    for another kind of file, one that is truncated or damaged, or text that is not UTF-8, with the row."""
    with _open(path) as (schema, read):
        columns = outer_names(schema, columns)
        yield from read_batches(path, read(columns), columns)


def list_names(path: Path, form: Form) -> list[str]:
    """The column names of such a file, as `list_parts`; raises as `read_columnar`."""
    with _open(path) as (schema, _):
        return list_struct_fields(schema)


def outer_names(schema: Any, names: Sequence[str]) -> list[str]:
    """The columns of an Arrow schema in which named parts stand."""
    return [column for column in schema.names if any(f"{name}.".startswith(f"{column}.") for name in names)]


def list_struct_fields(schema: Any) -> list[str]:
    """`list_parts` of the rows of an Arrow schema."""
    import pyarrow as pa

    def as_row(fields: Any) -> dict[str, Any]:
        return {field.name: as_row(field.type) if pa.types.is_struct(field.type) else None for field in fields}

    return list_parts(as_row(schema))


def read_batches(where: object, batches: Iterable[Any], columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells of some columns of Arrow tables or record batches, row by row; see `read_columnar`."""
    number = 0
    try:
        for batch in batches:
            arrays = [batch[column] for column in columns]
            changes = [(column, _find_change(array.type)) for column, array in zip(columns, arrays, strict=True)]
            for cells in zip(*arrays, strict=True):
                number += 1
                values = ((key, change, cell.as_py()) for (key, change), cell in zip(changes, cells, strict=True))
                yield {key: change(value) if change else value for key, change, value in values}
    except UnicodeDecodeError as error:
        raise UserError(f"{where}, row {number}: text that is not valid UTF-8 ({error.reason}): write it as UTF-8") from None


def _find_change(kind: Any) -> Callable[[Any], Any] | None:
    """What turns Python values of an Arrow type into a row's, None if nothing need be done: structs lose their null keys, because
    Arrow gives each the keys of all; JSON text, as which `datasets` stores objects of mixed types, keeps them."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: None if text is None else DECODER.decode(text)
    if pa.types.is_struct(kind):
        changes = [(field.name, _find_change(field.type) or (lambda value: value)) for field in kind]
        return lambda value: value and {key: change(value[key]) for key, change in changes if value[key] is not None}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type") and (change := _find_change(kind.value_type)):
        return lambda items: items and [change(item) for item in items]
    return None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Callable[[list[str]], Iterable[Any]]]]:
    """The schema, and a function that reads batches with some columns at least; Arrow files are memory-mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        begin = file.read(6)
    try:
        if begin.startswith(b"PAR1"):
            with pq.ParquetFile(path) as parquet:
                about = parquet.metadata
                num_bytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
                size = count_rows_at_once(about.num_rows, num_bytes)
                yield parquet.schema_arrow, lambda columns: parquet.iter_batches(batch_size=size, columns=columns)
        elif begin == b"ARROW1":
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as arrow:
                yield arrow.schema, lambda _: map(arrow.get_batch, range(arrow.num_record_batches))
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                yield stream.schema, lambda _: stream
    except (pa.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UserError(f"{path} is not a complete parquet or Arrow file ({reason}): copy or write it again") from None
