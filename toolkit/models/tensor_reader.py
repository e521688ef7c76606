"""Readers of tensors, by which values reach a model's parameters: each gives any part of one.

Over files and seeds nothing is in host memory but pieces of at most `PIECE_BYTES`, one a thread, so that no rank holds the full
model. Over a state dict each rank holds all of it, until a parameter has its values.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.distributed.comm import gather_objects, on_all_ranks, rank, world_size
from toolkit.distributed.progress import Phase
from toolkit.models.freeze import TensorHash
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_BYTES = 2**24
"""Most bytes of a tensor in host memory at once, counted in fp32."""

TensorSlice = tuple[slice, ...]
"""A part of a tensor: begin and end in each dimension."""


@dataclass(frozen=True)
class TensorReader:
    """One parameter's values."""

    shape: tuple[int, ...]
    read: Callable[[TensorSlice], torch.Tensor]
    """Reads any part onto the CPU, in the dtype of the loaded parameter."""
    dtype: torch.dtype | None = None
    """As stored in a file; None for values that are made."""
    is_held: bool = False
    """Each rank holds the full tensor in memory."""

    def read_all(self) -> torch.Tensor:
        """The full tensor."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    def to(self, dtype: torch.dtype) -> TensorReader:
        """The reader of the values converted to `dtype`, part by part."""
        return TensorReader(self.shape, lambda box: self.read(box).to(dtype))


TensorReaders = dict[str, TensorReader]
"""By the parameter's name."""


def state_readers(state: Mapping[str, torch.Tensor]) -> TensorReaders:
    """Readers of tensors by name, as in a state dict."""
    return {name: TensorReader(tuple(t.shape), t.detach().__getitem__, is_held=True) for name, t in state.items()}


def fill_buffers(model: nn.Module, readers: TensorReaders) -> None:
    """Read those of a model's buffers that have a reader, in place: buffers are not sharded, so each rank reads all of them."""
    for name, buffer in model.named_buffers():
        if name in readers:
            buffer.copy_(readers[name].read_all())


def copy_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with its parameters on the meta device; buffers are copied, ties and `requires_grad` kept."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give an unsharded model empty parameters on `device`, in place; buffers stay where they are."""
    for parameter in model.parameters():  # swapped, so that ties stay
        empty = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)


def fill_parameters(model: nn.Module, readers: TensorReaders) -> None:
    """Read this rank's shard of every parameter in place, in threads; all of one that is not sharded. Its reader is taken out of
    `readers`, and with it what the reader holds. A file that cannot be read is a `UserError` on every rank. Collective."""
    named = sorted(model.named_parameters(), key=lambda pair: -pair[1].numel())  # the largest first
    place_of = private("compute_local_shape_and_global_offset")

    @torch.no_grad()  # of this thread
    def fill(name: str, parameter: nn.Parameter) -> int:
        reader, shape = readers.pop(name), parameter.shape
        assert reader.shape == tuple(shape), f"{name} is {tuple(shape)}, its reader {reader.shape}"
        local, offset = parameter.data, (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            shape, offset = place_of(shape, parameter.device_mesh, parameter.placements)
        assert tuple(shape) == tuple(local.shape), f"{name}: {tuple(local.shape)} is not this rank's {tuple(shape)}"
        for piece in pieces(tuple(local.shape)):
            box = tuple(slice(begin + p.start, begin + p.stop) for begin, p in zip(offset, piece, strict=True))
            local[piece].copy_(reader.read(box))
        return local.nbytes

    def fill_all() -> None:
        for num_read in threads.map(fill, *zip(*named, strict=True)):
            loading.add(num_read)

    num_bytes = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for _, p in named)
    # Reading, hashing and copying release the GIL.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads, Phase("loading the weights", num_bytes, "B") as loading:
        on_all_ranks(fill_all)


class PassingHash:
    """`freeze.hash_tensor` of what a reader gives, made while its one user reads all of it, piece by piece in memory order."""

    def __init__(self, reader: TensorReader, dtype: torch.dtype) -> None:
        self._source: TensorReader | None = reader
        self._left, self._hashed = list(pieces(reader.shape)), TensorHash(reader.shape, dtype)
        self.reader = replace(reader, read=self._read)

    def _read(self, box: TensorSlice) -> torch.Tensor:
        assert self._source is not None and box == self._left.pop(0), "not read in memory order"
        self._hashed.add(part := self._source.read(box))
        if not self._left:
            self._source = None  # and what it holds
        return part

    def hexdigest(self) -> str:
        assert not self._left, "not all has been read"
        return self._hashed.hexdigest()


def hash_readers(readers: TensorReaders, dtypes: dict[str, torch.dtype], *, on_each_rank: bool = False) -> dict[str, str]:
    """`freeze.hash_tensor` of the tensors that `dtypes` names; one rank computes each, piece by piece, or each rank computes all,
    from what it reads itself. A file that cannot be read is a `UserError` on every rank. Collective."""

    def digest(name: str) -> str:
        passing = PassingHash(readers[name], dtypes[name])
        for piece in pieces(readers[name].shape):
            passing.reader.read(piece)
        return passing.hexdigest()

    # Share the tensors among ranks, the largest first, each to the rank with the least to hash.
    sizes = {name: math.prod(readers[name].shape) for name in dtypes}
    loads, mine = [0] * world_size(), list[str]()
    for name in sorted(dtypes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if on_each_rank or least == rank():
            mine.append(name)
    num_bytes = {name: sizes[name] * dtypes[name].itemsize for name in mine}

    def digest_mine() -> dict[str, str]:
        digests: dict[str, str] = {}
        for name, digests[name] in zip(mine, threads.map(digest, mine), strict=True):
            hashing.add(num_bytes[name])
        return digests

    with (
        ThreadPoolExecutor(torch.get_num_threads()) as threads,  # hashing releases the GIL
        Phase("hashing the frozen weights", sum(num_bytes.values()), "B") as hashing,
    ):
        hashes = on_all_ranks(digest_mine)
    of_ranks = [hashes] if on_each_rank else gather_objects(hashes)
    return dict(sorted(pair for of_rank in of_ranks for pair in of_rank.items()))


def pieces(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """Boxes that cover a tensor in memory order, cut along the first dimension to `PIECE_BYTES`, but at least one row each; a
    large expert (of three dimensions) is cut along the second."""
    if not shape:
        yield ()
    elif math.prod(shape):
        rows = PIECE_BYTES // 4 // math.prod(shape[1:])
        if not rows and len(shape) > 2:
            yield from ((slice(place, place + 1), *rest) for place in range(shape[0]) for rest in pieces(shape[1:]))
            return
        rows, rest = max(1, rows), tuple(slice(0, size) for size in shape[1:])
        for begin, end in itertools.pairwise([*range(0, shape[0], rows), shape[0]]):
            yield (slice(begin, end), *rest)
