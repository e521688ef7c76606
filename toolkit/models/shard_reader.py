"""Where each parameter's values come from, any part of it at a time, so that no rank has to hold a model whole.

Everything goes through host memory in pieces of `PIECE_BYTES`, whatever the size of a tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.distributed.comm import gather_objects, on_all_ranks, rank, world_size

PIECE_BYTES = 2**24
"""Most of a tensor that is in host memory at once, counted in fp32."""

Box = tuple[slice, ...]
"""A part of a tensor: begin and end in each dimension."""


@dataclass(frozen=True)
class Source:
    """One parameter's values."""

    shape: tuple[int, ...]
    read: Callable[[Box], torch.Tensor]
    """Any part, on the CPU, in the dtype that the whole would be loaded in."""


Sources = dict[str, Source]
"""By the name of the parameter."""


def whole_source(shape: torch.Size, make: Callable[[], torch.Tensor]) -> Source:
    """Of a small tensor, which is made whole each time and cut."""
    return Source(tuple(shape), lambda box: make()[box])


@torch.no_grad()
def fill_shards(model: nn.Module, sources: Sources) -> None:
    """Read this rank's part of every parameter, all of which are DTensors, into place. Collective.

    Raises:
        UserError: a file cannot be read; on every rank.
    """
    on_all_ranks(lambda: _fill_shards(model, sources))


def _fill_shards(model: nn.Module, sources: Sources) -> None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, parameter in model.named_parameters():
        source = sources[name]
        assert source.shape == tuple(parameter.shape), f"{name} is {tuple(parameter.shape)}, its source {source.shape}"
        assert isinstance(parameter, DTensor), name
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        assert tuple(shape) == tuple(local.shape), f"{name}: {tuple(local.shape)} is not this rank's {tuple(shape)}"
        for piece in pieces(tuple(local.shape)):
            box = tuple(slice(begin + p.start, begin + p.stop) for begin, p in zip(offset, piece, strict=True))
            local[piece].copy_(source.read(box))


def hash_sources(sources: Sources, headers: dict[str, str], dtypes: dict[str, torch.dtype]) -> dict[str, str]:
    """sha256 of a header and the bytes of the whole tensor, by name, each computed by one rank piece by piece. Collective.

    Args:
        headers: of the tensors that are wanted.
        dtypes: of their bytes.

    Raises:
        UserError: a file cannot be read; on every rank.
    """

    def digest(name: str) -> str:
        hashed = hashlib.sha256(headers[name].encode())
        for piece in pieces(sources[name].shape):
            part = sources[name].read(piece).to(dtypes[name]).contiguous()
            hashed.update(part.view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    loads = [0] * world_size()
    mine = []
    for name in sorted(headers, key=lambda name: (-math.prod(sources[name].shape), name)):
        least = loads.index(min(loads))
        loads[least] += math.prod(sources[name].shape)
        if least == rank():
            mine.append(name)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # hashing releases the interpreter's lock
        hashes = on_all_ranks(lambda: dict(zip(mine, threads.map(digest, mine), strict=True)))
    gathered = {name: value for of_rank in gather_objects(hashes) for name, value in of_rank.items()}
    return {name: gathered[name] for name in sorted(gathered)}


def pieces(shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of at most `PIECE_BYTES` along the first dimension (one row at least) that make up the whole, in order of memory."""
    if not shape:
        yield ()
    elif math.prod(shape):
        rows = max(1, PIECE_BYTES // 4 // math.prod(shape[1:]))
        rest = tuple(slice(0, size) for size in shape[1:])
        for begin, end in itertools.pairwise([*range(0, shape[0], rows), shape[0]]):
            yield (slice(begin, end), *rest)
