"""The file of a split's tokens, and the hash of its values, which says whether two runs train on the same tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


class TokenFile:
    """An Arrow stream. Its values are hashed as they are written, by column, so that the sizes of blocks do not matter."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._stream: Any = None
        self._digests: dict[str, list[Any]] = {}
        self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        """Write rows; the first ones decide the types of the columns."""
        import pyarrow as pa

        if self._stream is None:
            self._schema = table.schema.remove_metadata()
            self._stream = pa.ipc.new_stream(self._file, self._schema)
            self._digests = {name: [] for name in sorted(table.column_names)}
        table = table.cast(self._schema)
        self.num_rows += len(table)
        self._stream.write_table(table)
        for name, digests in self._digests.items():
            for chunk in filter(len, table[name].chunks):
                values = _list_values(chunk)
                digests += [hashlib.sha256() for _ in values[len(digests) :]]
                for digest, array in zip(digests, values, strict=True):
                    digest.update(np.ascontiguousarray(array).data)

    def close(self) -> None:
        """End the file."""
        if self._stream is not None:
            self._stream.close()
        self._file.close()

    def hash_values(self, part: str) -> bytes:
        """What the fingerprint of tokens takes of the columns of `part`."""
        hashed = b""
        for name, digests in self._digests.items():
            hashed += f"{part} {name} {self._schema.field(name).type} {self.num_rows}".encode()
            hashed += b"".join(digest.digest() for digest in digests or [hashlib.sha256()])
        return hashed


def _list_values(chunk: pa.Array) -> list[np.ndarray]:
    """The values of a part of a column; of texts and lists the lengths first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        return [array.to_numpy(zero_copy_only=False) for array in (pc.list_value_length(chunk), chunk.flatten())]
    if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
        lengths = pc.binary_length(chunk).to_numpy(zero_copy_only=False)
        return [lengths, np.frombuffer("".join(chunk.to_pylist()).encode(), dtype=np.uint8)]
    return [chunk.to_numpy(zero_copy_only=False)]
