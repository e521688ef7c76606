"""The hash of tokenized rows, which says whether two runs train on the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.tokens.read_tokenizer import open_tokenizer
from toolkit.data.tokens.tokenizer import hash_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


def hash_contents(folder: Path) -> str:
    """sha256 of the columns of tokenized rows and of their tokenizer, independent of the files' block sizes.

    It is computed once, when the rows are written, with one block in memory at a time (1.5 s per GB here). Later runs compare
    the files, see `cache_folders`.
    """
    from datasets import load_from_disk

    digest = hashlib.sha256(hash_tokenizer(open_tokenizer(folder / "tokenizer")).encode())
    for part in ("train", "evaluation"):
        table = load_from_disk(str(folder / part)).data.table
        for name in sorted(table.column_names):
            column = table.column(name)
            digest.update(f"{part} {name} {column.type} {len(column)}".encode())
            for chunks in _list_values(column.chunks):
                values = hashlib.sha256()
                for chunk in chunks:
                    values.update(np.ascontiguousarray(chunk).data)
                digest.update(values.digest())
    return digest.hexdigest()


def _list_values(chunks: list[pa.Array]) -> Iterator[Iterator[np.ndarray]]:
    """The values of a column, block by block; for texts and lists the lengths first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = chunks[0].type if chunks else pa.null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield (pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks)
        yield (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield (pc.binary_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks)
        yield (np.frombuffer("".join(chunk.to_pylist()).encode(), dtype=np.uint8) for chunk in chunks)
    else:
        yield (chunk.to_numpy(zero_copy_only=False) for chunk in chunks)
