"""Sources of parameters, which read any part of a tensor, so that no rank holds the full model.

Everything passes through host memory in pieces of at most `PIECE_BYTES`, whatever the size of a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.distributed.comm import gather_objects, on_all_ranks, rank, world_size
from toolkit.distributed.progress import Phase
from toolkit.models.freeze import hash_parts
from toolkit.private import private

PIECE_BYTES = 2**24
"""Most bytes of a tensor in host memory at once, counted in fp32."""

Box = tuple[slice, ...]
"""A part of a tensor: begin and end in each dimension."""


@dataclass(frozen=True)
class Source:
    """One parameter's values."""

    shape: tuple[int, ...]
    read: Callable[[Box], torch.Tensor]
    """Reads any part onto the CPU, in the dtype of the loaded parameter."""
    dtype: torch.dtype | None = None
    """As stored in a file; None for values that are made."""

    def to(self, dtype: torch.dtype) -> Source:
        """The source of the values converted to `dtype`, part by part."""
        return Source(self.shape, lambda box: self.read(box).to(dtype))


Sources = dict[str, Source]
"""Sources by parameter name."""


@torch.no_grad()
def fill_shards(model: nn.Module, sources: Sources) -> None:
    """Read this rank's shard of every parameter in place; all of one that is not sharded. A file that cannot be read is a
    `UserError` on every rank. Collective."""
    num_bytes = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
    with Phase("loading the weights", num_bytes, "B") as loading:
        on_all_ranks(lambda: _fill_shards(model, sources, loading))


def _fill_shards(model: nn.Module, sources: Sources, loading: Phase) -> None:
    place_of = private("compute_local_shape_and_global_offset")
    for name, parameter in model.named_parameters():
        source = sources[name]
        assert source.shape == tuple(parameter.shape), f"{name} is {tuple(parameter.shape)}, its source {source.shape}"
        local, shape, offset = parameter.data, parameter.shape, (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            shape, offset = place_of(parameter.shape, parameter.device_mesh, parameter.placements)
        assert tuple(shape) == tuple(local.shape), f"{name}: {tuple(local.shape)} is not this rank's {tuple(shape)}"
        for piece in pieces(tuple(local.shape)):
            box = tuple(slice(begin + p.start, begin + p.stop) for begin, p in zip(offset, piece, strict=True))
            local[piece].copy_(source.read(box))
            loading.add(local[piece].nbytes)


def hash_sources(sources: Sources, dtypes: dict[str, torch.dtype]) -> dict[str, str]:
    """`freeze.hash_tensor` of the tensors that `dtypes` names; one rank computes each, piece by piece. A file that cannot be
    read is a `UserError` on every rank. Collective."""

    def digest(name: str) -> str:
        source = sources[name]
        return hash_parts(dtypes[name], source.shape, map(source.read, pieces(source.shape)))

    # Share the tensors among ranks, the largest first, each to the rank with the least to hash.
    loads = [0] * world_size()
    mine = []
    for name in sorted(dtypes, key=lambda name: (-math.prod(sources[name].shape), name)):
        least = loads.index(min(loads))
        loads[least] += math.prod(sources[name].shape)
        if least == rank():
            mine.append(name)
    num_bytes = {name: math.prod(sources[name].shape) * dtypes[name].itemsize for name in mine}

    def digest_mine() -> dict[str, str]:
        digests = {}
        for name, found in zip(mine, threads.map(digest, mine), strict=True):
            digests[name] = found
            hashing.add(num_bytes[name])
        return digests

    with (
        ThreadPoolExecutor(torch.get_num_threads()) as threads,  # hashing releases the GIL
        Phase("hashing the frozen weights", sum(num_bytes.values()), "B") as hashing,
    ):
        hashes = on_all_ranks(digest_mine)
    return dict(sorted(pair for of_rank in gather_objects(hashes) for pair in of_rank.items()))


def pieces(shape: tuple[int, ...]) -> Iterator[Box]:
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
