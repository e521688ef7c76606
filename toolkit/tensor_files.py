"""Sharded tensors on disk through torch.distributed.checkpoint (DCP), without running code from the files.

DCP's `.metadata` is a pickle (pytorch#189308: `weights_only` does not cover it), so it is read through an allowlist of the
classes it is made of. Only tensors are put in: DCP loads anything else with `torch.load(weights_only=False)`.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from toolkit.distributed import control_group, rank

# DCP says so whenever one process saves without a process group, which is what the `single` preset does.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Tensors = dict[str, torch.Tensor]

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("builtins", "set"), ("builtins", "tuple"),
}  # fmt: skip


def save_tensors(tensors: Tensors, folder: Path) -> list[str]:
    """Write this rank's shards of `tensors` (DTensors, ShardedTensors or plain ones); returns its file names. Collective."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.save(tensors, storage_writer=writer, process_group=control_group())
    names = [path.name for path in folder.glob(f"__{rank()}_*.distcp")]
    return [*names, ".metadata"] if rank() == 0 else names


def load_tensors(tensors: Tensors, folder: Path) -> None:
    """Fill `tensors` in place, whatever number of ranks wrote the files. Collective.

    Raises:
        ValueError: a tensor is missing or has another shape, or a file is not what `save_tensors` wrote.
    """
    reader = _SafeReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in stored:
            raise ValueError(f"{folder} holds no {name}")
        size = cast(TensorStorageMetadata, stored[name]).size
        if tuple(size) != tuple(tensor.size()):
            raise ValueError(f"{folder} holds {name} with shape {tuple(size)}, not {tuple(tensor.size())}")
    dcp.load(tensors, storage_reader=reader, process_group=control_group())


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder that `save_tensors` wrote.

    Raises:
        ValueError: it is not what `save_tensors` wrote.
    """
    return set(_SafeReader(folder).read_metadata().state_dict_metadata)


class _SafeReader(dcp.FileSystemReader):
    """DCP's reader with the metadata read through an allowlist, and only files inside the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, of tensors only."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            try:
                metadata = _AllowlistUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
                raise ValueError(f"{self.path}/.metadata is no checkpoint metadata: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self.path}/.metadata is no checkpoint metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{self.path}/.metadata: {name} is not a tensor")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise ValueError(f"{self.path}/.metadata names {info.relative_path}, which is outside the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _AllowlistUnpickler(pickle.Unpickler):
    """Builds the few classes of DCP's metadata and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one that metadata is made of."""
        if module == "pathlib._local":  # where Python 3.13 says that its paths are; other versions have no such module
            module = "pathlib"
        if (module, name) not in _ALLOWED and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)
