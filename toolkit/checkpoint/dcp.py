"""Saves and loads sharded tensors with torch.distributed.checkpoint (DCP), without executing code from the files.

DCP's `.metadata` is a pickle (pytorch#189308: `weights_only` does not cover it). It is unpickled with an allowlist of its
classes, and checked for consistency before it is used; `manifest.check_files` has refused links. Checkpoints hold only tensors,
because DCP loads anything else with `torch.load(weights_only=False)`. Shards are read one tensor at a time, and each must match
the metadata.
"""

import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from toolkit.distributed.comm import control_group, on_all_ranks, rank
from toolkit.distributed.progress import Phase
from toolkit.errors import UserError, refused
from toolkit.private import NO_PROCESS_GROUP, private

Tensors = dict[str, torch.Tensor]

_COPY_AHEAD_BYTES = 10_000_000  # torch's own

_SHARD_NAME = re.compile(r"__\d+_\d+\.distcp")

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


def save_tensors(tensors: Tensors, folder: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """Write this rank's shards of `tensors` (DTensors, ShardedTensors or plain tensors); returns its file names. Collective, over
    a gloo group of all ranks that no other thread uses meanwhile; None for one process."""
    # On a machine with a GPU, DCP's overlapping loader makes its thread wait for the GPU's current stream, so for training
    # (torch/distributed/checkpoint/filesystem.py:161). Staged tensors need no loader that overlaps. Of FSDP1's tensors with fewer
    # rows than ranks, some ranks have no part; their `device` is then the thread's, GPU 0, under nccl
    # (torch/distributed/_shard/sharded_tensor/_ops/tensor_ops.py:54).
    of_fsdp1: Any = private("ShardedTensor")
    parts = [[s.tensor for s in t.local_shards()] if isinstance(t, of_fsdp1) else [t] for t in tensors.values()]
    is_staged = all(part.device.type == "cpu" for of_tensor in parts for part in of_tensor)
    writer = _Writer(folder, sync_files=True, per_thread_copy_ahead=0 if is_staged else _COPY_AHEAD_BYTES)
    warnings.filterwarnings("ignore", message=NO_PROCESS_GROUP)
    try:
        with Phase(f"writing {folder.parent.stem}", None, "B") as writing:
            dcp.save(tensors, storage_writer=writer, planner=_ShownPlanner(writing), process_group=group)
    except CheckpointException as error:  # a BaseException, whose text holds the tracebacks of all ranks
        raise next(failure for failure, _ in error.failures.values()) from None
    names = [path.name for path in folder.glob(f"__{rank()}_*.distcp")]
    return [*names, ".metadata"] if rank() == 0 else names


def load_tensors(tensors: Tensors, folder: Path, trouble: str) -> None:
    """Fill `tensors` in place; any number of ranks may have written the files. A tensor that is missing or has another shape, or
    a file that is not what `save_tensors` writes, is a `UserError` on every rank, which begins with `trouble`. Collective."""
    reader = _SafeReader(folder)
    warnings.filterwarnings("ignore", message=NO_PROCESS_GROUP)

    def explained(work: Callable[[], Any]) -> None:
        try:
            work()
        except (ValueError, OSError, CheckpointException) as error:
            # The text of a CheckpointException holds the tracebacks of all ranks.
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            raise UserError(f"{trouble}: {' '.join(str(reason).split()) or type(reason).__name__}") from None

    on_all_ranks(lambda: explained(reader.read_metadata))
    on_all_ranks(lambda: explained(lambda: dcp.load(tensors, storage_reader=reader, process_group=control_group())))


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder that `save_tensors` wrote; a `ValueError` if it did not."""
    return set(_SafeReader(folder).read_metadata().state_dict_metadata)


class _Writer(dcp.FileSystemWriter):
    """torch's default, but it raises what the system refused: only the type and text of an error reach the other ranks."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # torch's zip writer raises a RuntimeError about positions in the file
            raise refused(error) or error from None


class _ShownPlanner(dcp.DefaultSavePlanner):
    """torch's default, with the progress of this rank's part."""

    def __init__(self, writing: Phase) -> None:
        super().__init__()
        self.writing = writing

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        """Ranks share what each of them has: only now it is known who writes it."""
        about = [item.tensor_data for item in new_plan.items if item.tensor_data is not None]
        self.writing.total = sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in about)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        tensor = super().resolve_data(write_item)
        assert isinstance(tensor, torch.Tensor)  # `state_tensors` has nothing else
        self.writing.add(tensor.nbytes)
        return tensor


class _SafeReader(dcp.FileSystemReader):
    """DCP's reader, but it unpickles metadata with an allowlist, once, and reads only tensors from shards of the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked metadata, which describes only tensors."""
        if self.metadata is None:
            path = self.folder / ".metadata"
            with path.open("rb") as file:
                try:
                    metadata = _AllowlistUnpickler(file).load()
                    _check_metadata(metadata)
                except Exception as error:  # a pickle may raise anything, and its objects may lack any attribute
                    raise ValueError(f"{path} is not a checkpoint metadata: {error}") from None
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self.metadata = metadata
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Copy the parts of stored tensors that DCP's load plan asks for into place."""
        # Each file is opened once.
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        loading = Phase(f"loading {self.folder.parent.name}", len(plan.items), "tensors")
        for name, items in by_file.items():
            with (self.folder / name).open("rb") as file:
                for item in items:
                    stored = self._read_tensor(file, name, item.storage_index)
                    begins = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item).detach()
                    # Floating types are converted: FSDP1 keeps buffers in bf16, other strategies in fp32.
                    if stored.dtype != target.dtype and not (stored.is_floating_point() and target.is_floating_point()):
                        raise ValueError(f"it holds {item.storage_index.fqn} as {stored.dtype}, not {target.dtype}")
                    target.copy_(stored[tuple(slice(begin, begin + length) for begin, length in begins)])
                    planner.commit_tensor(item, target)
                    loading.add(1)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read_tensor(self, file: IO[bytes], name: str, index: MetadataIndex) -> torch.Tensor:
        """One stored tensor: a full one, or one rank's shard."""
        about: Any = self.read_metadata().state_dict_metadata[index.fqn]
        shape = next(tuple(chunk.sizes) for chunk in about.chunks if chunk.offsets == index.offset)
        cut, dtype, path = private("_slice_file", self), about.properties.dtype, self.folder / name
        try:
            stored = torch.load(cut(file, self.storage_data[index]), map_location="cpu", weights_only=True)
        except Exception as error:  # as above; torch's message advises weights_only=False
            raise ValueError(f"{path} holds no tensor for {index.fqn} ({refused(error) or type(error).__name__})") from None
        if type(stored) is not torch.Tensor or stored.layout != torch.strided or stored.device.type != "cpu":
            raise ValueError(f"{path} holds no plain tensor for {index.fqn}")
        if tuple(stored.shape) != shape or stored.dtype != dtype:
            found = f"with shape {tuple(stored.shape)} as {stored.dtype}"
            raise ValueError(f"{path} holds {index.fqn} {found}, not {shape} as {dtype}")
        return stored


def _check_metadata(metadata: Any) -> None:
    """Refuse metadata that names other files than shards, or whose shards do not cover its tensors exactly."""
    if type(metadata) is not Metadata:
        raise ValueError("it is something else")
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata or not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"{name} is not a tensor")
        for chunk in entry.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            fits = all(0 <= offset <= end <= size for offset, end, size in zip(chunk.offsets, ends, entry.size, strict=True))
            if not fits or MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise ValueError(f"a part of {name} lies outside it, or in no file")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"it does not say where all of {name} is")
    for info in metadata.storage_data.values():
        if not _SHARD_NAME.fullmatch(info.relative_path):
            raise ValueError(f"it names {info.relative_path}, which is no shard of the checkpoint")
        if info.transform_descriptors:
            raise ValueError(f"it names {info.relative_path} as transformed, which none of ours is")


class _AllowlistUnpickler(pickle.Unpickler):
    """Unpickles the few classes of DCP's metadata and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # Python 3.13's module of paths, which other versions lack
            module = "pathlib"
        if (module, name) not in _ALLOWED and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)
