"""A model's safetensors files, and which of their tensors is which of the model's, found by their headers alone.

Names are matched by transformers' own rules (renamings of old checkpoints, a base model's prefix). Where transformers would make
a tensor out of others, or compute one, parts of it cannot be read: `WholeOnly` says why.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from toolkit.distributed.comm import broadcast_object, on_all_ranks, rank
from toolkit.errors import UserError
from toolkit.models.config import WEIGHTS_FILES, WEIGHTS_INDEX
from toolkit.models.shard_reader import Box, Source, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names."""


class WholeOnly(Exception):
    """Why these weights cannot be read in parts: the end of a sentence."""


@dataclass(frozen=True)
class Match:
    """What files hold of a model; names as in its `state_dict`."""

    tensors: dict[str, str]
    """Names of the model → names in the files. Of tied names the file may have any, or all."""
    missing: list[str]
    """Names of the model that stand in no file, nor does another of the same weight."""
    other_shapes: dict[str, tuple[int, ...]]
    """Names of the model whose tensor has another shape → that shape."""
    unknown: list[str]
    """Names in the files that the model does not have."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: BinaryIO
    begin: int
    """Of its bytes in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles:
    """Open safetensors files; nothing but their headers is read until a part of a tensor is.

    That is read here and not by the safetensors library: from a mapped file it leaves every page it has seen resident, and its
    `pread` backend (0.8.0) takes a tenth of a second for each part.
    """

    def __init__(self, paths: Iterable[Path], what: str) -> None:
        """
        Args:
            what: names them in an error.

        Raises:
            UserError: one of them cannot be read.
            WholeOnly: one of them holds numbers of a kind that is not known here.
        """
        self.stored: dict[str, _Stored] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt"):  # checks that offsets, shapes and the file's size go together
                    file = path.open("rb", buffering=0)
                    self.stored |= _read_header(file)
            except (SafetensorError, OSError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UserError(f"{path.name} of {what} cannot be read as safetensors ({reason}): save the model again") from None

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor, by its name in the files."""
        return self.stored[key].shape

    def source(self, key: str, dtype: torch.dtype) -> Source:
        """A tensor, converted to `dtype` part by part."""
        stored = self.stored[key]
        return Source(stored.shape, lambda box: _read_part(stored, box).to(dtype))


def find_weight_files(name_or_path: str, revision: str | None, named: str | None = None) -> list[Path]:
    """The safetensors files that transformers would load from a folder or, after a download, from the hub's cache.

    Args:
        named: the config's `transformers_weights`, which of `WEIGHTS_FILES` to take.

    Raises:
        WholeOnly: it finds none: transformers itself may know more, or says so.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    try:
        for file in [named] if named else WEIGHTS_FILES:
            found = cached_file(name_or_path, file, revision=revision, _raise_exceptions_for_missing_entries=False)
            if found is not None and file == WEIGHTS_INDEX:
                return [Path(path) for path in get_checkpoint_shard_files(name_or_path, found, revision=revision)[0]]
            if found is not None:
                return [Path(found)]
    except OSError as error:
        raise WholeOnly(next(iter(str(error).splitlines()), type(error).__name__)) from None
    raise WholeOnly(f"{name_or_path} has no {' or '.join(WEIGHTS_FILES)}")


def match_names(model: PreTrainedModel, files: WeightFiles) -> Match:
    """Find a model's parameters and persistent buffers in the files. The model may be weightless, and is not adapted yet.

    Raises:
        WholeOnly: transformers makes some tensor out of others.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix
    tensors: dict[str, str] = {}
    unknown = []
    for key in sorted(files.stored):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unknown.append(key)
        elif pattern is not None:
            raise WholeOnly(f"transformers makes {name} out of tensors of another form")
        elif name in tensors:
            raise WholeOnly(f"{tensors[name]} and {key} are both {name}")
        else:
            tensors[name] = key
    # As transformers keeps them for saving.
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]
    present = {id(wanted[name]) for name in tensors}
    shapes = {name: files.shape(key) for name, key in tensors.items()}
    return Match(
        tensors=tensors,
        missing=sorted(name for name, tensor in wanted.items() if id(tensor) not in present),
        other_shapes={name: shape for name, shape in shapes.items() if shape != tuple(wanted[name].shape)},
        unknown=unknown,
    )


def check_computed(model: PreTrainedModel, match: Match) -> None:
    """Tensors that the model's class says may be missing are computed when it is loaded whole.

    Raises:
        WholeOnly: one of those is missing.
    """
    patterns = model._keys_to_ignore_on_load_missing or ()
    for name in match.missing:
        if any(re.search(pattern, name) for pattern in patterns):
            raise WholeOnly(f"{name} is in no file, but computed")


def check_ties(model: PreTrainedModel, files: WeightFiles, match: Match) -> None:
    """A tied weight may be stored under several of its names, which transformers unties where they differ. Collective.

    Raises:
        WholeOnly: on every rank, if they do; rank 0 compares them.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in match.tensors:
            names_of.setdefault(id(parameter), []).append(name)

    def find() -> str | None:
        for first, *others in names_of.values() if rank() == 0 else ():
            for other in others:
                one, two = (files.source(match.tensors[name], torch.float32) for name in (first, other))
                if not all(torch.equal(one.read(piece), two.read(piece)) for piece in pieces(one.shape)):
                    return f"{first} and {other} are tied, but differ in the files"
        return None

    if reason := broadcast_object(on_all_ranks(find)):
        raise WholeOnly(reason)


def _read_header(file: BinaryIO) -> dict[str, _Stored]:
    """Format: length of the header in 8 bytes, the header as JSON, the tensors' bytes."""
    length = int.from_bytes(file.read(8), "little")
    stored = {}
    for name, about in json.loads(file.read(length)).items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in DTYPES:
            raise WholeOnly(f"{name} is stored as {about['dtype']}")
        begin = 8 + length + about["data_offsets"][0]
        stored[name] = _Stored(file, begin, DTYPES[about["dtype"]], tuple(about["shape"]))
    return stored


def _read_part(stored: _Stored, box: Box) -> torch.Tensor:
    """Rows of a tensor, read whole, then cut in the other dimensions.

    Raises:
        UserError: the file, whose header was whole, cannot be read any more.
    """
    first, end = (box[0].start, box[0].stop) if box else (0, 1)
    num_row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    num_bytes = (end - first) * num_row_bytes
    if not num_bytes:
        return torch.empty(end - first, *stored.shape[1:], dtype=stored.dtype)
    # Memory that goes back to the system: malloc keeps what it gave for parts of tensors, for every thread of its own.
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    unread, place = memoryview(buffer), stored.begin + first * num_row_bytes
    while unread:
        try:
            num_read, reason = os.preadv(stored.file.fileno(), [unread], place), "it has become shorter"
        except OSError as error:
            num_read, reason = 0, str(error.strerror)
        if num_read == 0:
            raise UserError(f"{stored.file.name} changed or went away while it was read ({reason}): start again when it is whole")
        unread, place = unread[num_read:], place + num_read
    part = torch.frombuffer(buffer, dtype=stored.dtype).view(end - first, *stored.shape[1:])
    return part[(slice(None), *box[1:])] if box else part[0]
