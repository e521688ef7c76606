"""Matches the tensors in safetensors files to a model's, from the files' headers alone.

Names are matched by transformers' own rules (renamings of old checkpoints, a base model's prefix). Experts that are stored one
by one are read as the one weight that the model has. Other tensors that transformers would convert from others, or compute,
cannot be read in parts: `ShardedReadUnsupported` says why.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from toolkit.distributed.comm import on_rank_0
from toolkit.errors import UserError, first_line, plural
from toolkit.models.config import WEIGHTS_FILES, WEIGHTS_INDEX
from toolkit.models.dequantize import dequantized
from toolkit.models.freeze import shorten
from toolkit.models.tensor_reader import TensorReader, TensorReaders, TensorSlice, pieces
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
"""torch dtypes by safetensors' names."""
_OF_EXPERTS = [("MergeModulelist", 0), ("Concatenate", 1)]
"""transformers' operations, one or both, on the tensors of the experts that are one weight in the model."""
LEAST_IGNORED_SHARE = 1e-3
"""T5's files have a bias that no layer reads, of a few hundred elements."""


class ShardedReadUnsupported(UserError):
    """These weights cannot be read in parts; the message is a reason that completes a sentence."""


@dataclass(frozen=True)
class Match:
    """How the tensors in files match a model's; names as in its `state_dict`."""

    tensors: dict[str, str]
    """Names of the model → names in the files. A tied weight may be stored under any or all of its names."""
    missing: list[str]
    """Names of the model that are in no file, under no alias."""
    other_shapes: dict[str, tuple[int, ...]]
    """Names of the model whose stored tensor has another shape → the stored shape."""
    unknown: list[str]
    """Names that the model does not have, as transformers renames them; without those that it ignores in models of this class."""
    ignored: list[str] = field(default_factory=list)
    """Those, if their matrices are at least `LEAST_IGNORED_SHARE` of the files: layers that predict further tokens (`mtp`)."""


def open_files(paths: Iterable[Path], what: str) -> TensorReaders:
    """The tensors of safetensors files. Only headers are read; parts of tensors are read on demand, quantized ones dequantized.

    The safetensors library does not read them: with a mapped file every page it touches stays resident, and its `pread`
    backend (0.8.0) takes a tenth of a second per part. A file that cannot be read, or a quantized weight that lacks a tensor, is
    a `UserError` with `what`, the setting and path; a dtype that is not in `DTYPES`, or codes in fp8 without their scales, are a
    `ShardedReadUnsupported`.
    """
    stored: TensorReaders = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt"):  # checks offsets, shapes and the file's size
                file = path.open("rb", buffering=0)
                # 8 bytes with the header's length, the header as JSON, then the tensors' bytes.
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
        except (SafetensorError, OSError) as error:
            what = f"{path.name} of {what} cannot be read as safetensors"
            raise UserError(f"{what} ({first_line(error)}): save the model again") from None
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] not in DTYPES:
                raise ShardedReadUnsupported(f"{name} is stored as {about['dtype']}")
            dtype, shape, begin = DTYPES[about["dtype"]], tuple(about["shape"]), 8 + length + about["data_offsets"][0]
            stored[name] = TensorReader(shape, partial(_read_part, file, begin, dtype, shape), dtype)
    readers = dequantized(stored, what)
    for name, reader in readers.items():
        if reader.dtype == torch.float8_e4m3fn:
            raise ShardedReadUnsupported(f"{name} is stored as F8_E4M3, without scales of blocks of 128 x 128")
    return readers


def find_weight_files(name_or_path: str, revision: str | None, named: str | None = None) -> list[Path]:
    """The safetensors files that transformers would load from a folder or, after a download, from the hub's cache.

    The config may have `named` one of `WEIGHTS_FILES` (`transformers_weights`). If there are none, that is a
    `ShardedReadUnsupported`: transformers may still find weights, or raises the error.
    """
    from transformers.utils import cached_file

    try:
        for file in [named] if named else WEIGHTS_FILES:
            found = cached_file(name_or_path, file, revision=revision, _raise_exceptions_for_missing_entries=False)
            if found is not None and file == WEIGHTS_INDEX:
                return [Path(path) for path in private("get_checkpoint_shard_files")(name_or_path, found, revision=revision)[0]]
            if found is not None:
                return [Path(found)]
    except OSError as error:
        raise ShardedReadUnsupported(first_line(error)) from None
    raise ShardedReadUnsupported(f"{name_or_path} has no {' or '.join(WEIGHTS_FILES)}")


def match_files(model: PreTrainedModel, name_or_path: str, revision: str | None, what: str) -> tuple[TensorReaders, Match]:
    """The tensors in the files of a folder or hub id, `what` in errors, and `match_names` of them; that transformers computes one
    that is in no file is a `ShardedReadUnsupported`."""
    named = getattr(model.config, "transformers_weights", None)
    files = open_files(find_weight_files(name_or_path, revision, named), what)
    match = match_names(model, files, f"the weights of {what}")
    computed = private("_keys_to_ignore_on_load_missing", model) or ()
    for name in match.missing:
        if any(re.search(pattern, name) for pattern in computed):
            raise ShardedReadUnsupported(f"{name} is in no file, but computed")
    return files, match


def match_names(model: PreTrainedModel, files: TensorReaders, what: str = "the files") -> Match:
    """Find a model's parameters and persistent buffers in `open_files`. The model may be on the meta device; it has no adapter. A
    tensor that transformers converts from others is a `ShardedReadUnsupported`; different values under two names of one are a
    `UserError`."""
    # transformers' conversion rules for this model.
    conversions = private("get_model_conversion_mapping")(model)
    renamings = [entry for entry in conversions if isinstance(entry, private("WeightRenaming"))]
    converters = [entry for entry in conversions if isinstance(entry, private("WeightConverter"))]
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix
    # Rename each key as transformers does.
    rename = private("rename_source_key")
    tensors: dict[str, str] = {}
    unknown: dict[str, int] = {}
    """Elements, of matrices: masks of GPT-2's old files have more dimensions."""
    of_experts: dict[str, dict[str, list[TensorReader]]] = {}  # the tensors of a weight, by the pattern of their names
    for key in sorted(files, key=private("dot_natural_key")):  # expert 10 after 9
        name, pattern = rename(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename(key, [], [], prefix, wanted)
        if name not in wanted:
            first, *others = next((one.target_patterns for one in converters if pattern in one.source_patterns), [name])
            num_elements = math.prod(files[key].shape) if len(files[key].shape) == 2 else 0
            unknown |= {name: num_elements} | dict.fromkeys((name.replace(first, other) for other in others), 0)
        elif pattern is not None and name not in tensors:
            of_experts.setdefault(name, {}).setdefault(pattern, []).append(files[key])
        elif name in of_experts:
            raise UserError(f"{what} have {key}, and its experts one by one: keep what is meant")
        elif (other := tensors.setdefault(name, key)) != key and _differ(files[other], files[key]):
            raise UserError(f"{what} have {other} and {key}, one parameter with two values: keep the one that is meant")
    for name, parts in of_experts.items():
        converter: Any = next(one for one in converters if parts.keys() <= set(one.source_patterns))
        operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
        if operations != _OF_EXPERTS[: len(operations)]:
            raise ShardedReadUnsupported(f"transformers makes {name} out of tensors of another form")
        if (merged := _merge([parts.get(pattern, []) for pattern in converter.source_patterns])) is not None:
            files[name], tensors[name] = merged, name
    # transformers keeps the conversions for saving.
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]
    ignoring: Any = SimpleNamespace(missing_keys=set(), unexpected_keys={*unknown})
    private("_adjust_missing_and_unexpected_keys", model)(ignoring)
    ignored = {name: size for name, size in unknown.items() if name not in ignoring.unexpected_keys}
    least = LEAST_IGNORED_SHARE * sum(math.prod(tensor.shape) for tensor in files.values())
    present = {id(wanted[name]) for name in tensors}
    shapes = {name: files[key].shape for name, key in tensors.items()}
    return Match(
        tensors=tensors,
        missing=sorted(name for name, tensor in wanted.items() if id(tensor) not in present),
        other_shapes={name: shape for name, shape in shapes.items() if shape != tuple(wanted[name].shape)},
        unknown=sorted(ignoring.unexpected_keys),
        ignored=sorted(ignored) if sum(ignored.values()) >= least > 0 else [],
    )


def check_loaded(objective: Objective, model: PreTrainedModel, name_or_path: str, match: Match) -> None:
    """Refuse weights that are incomplete, which transformers would draw at random, or have other (stored) shapes; a head that the
    objective may draw may be missing. Log unknown ones."""
    what, unknown, backbone = f"the weights of model.name_or_path {name_or_path}", match.unknown, f"{model.base_model_prefix}."
    if names := [name for name in match.missing if not objective.may_draw_head or name.startswith(backbone)]:
        others = f", and have {len(unknown)} others ({', '.join(unknown[:3])}, …)" if unknown else ""
        renamed = "; if only names differ, save it without what wraps it (DDP, torch.compile, an adapter, a larger model)"
        remedy = f"give complete weights, or model.from_scratch true{renamed if unknown else ''}"
        lacks = f"lack {len(names)} of the model's parameters ({', '.join(names[:3])}, …), which would stay random"
        raise UserError(f"{what} {lacks}{others}: {remedy}")
    for name, stored in sorted(match.other_shapes.items()):
        made = tuple(model.state_dict()[name].shape)
        raise UserError(f"{what} have {name} of shape {stored}, but its config.json makes it {made}: give that of the weights")
    if unclaimed := sorted([*unknown, *match.ignored]):
        number = plural(len(unclaimed), "tensor")
        also = f"{what} also have {number} that the model does not take, so neither trained nor exported"
        logger.warning(f"{also}: {shorten(unclaimed)}")


def untie_differing(model: PreTrainedModel, files: TensorReaders, match: Match) -> None:
    """Untie weights that are stored with different values, as transformers does: heads of flan-T5, T5 1.1, mT5. Collective.

    transformers 5 builds these models tied, whatever their config says. Rank 0 compares the values.
    """

    names_of: dict[str, list[str]] = {}  # of each tied weight; the first need not be stored
    for name, first in model.all_tied_weights_keys.items():
        names_of.setdefault(first, [first]).append(name)
    stored = [[name for name in names if name in match.tensors] for names in names_of.values()]
    pairs = [(names[0], other) for names in stored for other in names[1:]]
    for _, name in on_rank_0(lambda: [pair for pair in pairs if _differ(*(files[match.tensors[name]] for name in pair))]):
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, nn.Parameter(torch.empty_like(model.get_parameter(name))))
        model.all_tied_weights_keys.pop(name)


def _differ(one: TensorReader, two: TensorReader) -> bool:
    """Whether two tensors have other values, in whatever dtype."""
    one, two = one.to(torch.float32), two.to(torch.float32)
    return one.shape != two.shape or not all(torch.equal(one.read(piece), two.read(piece)) for piece in pieces(one.shape))


def _merge(lists: list[list[TensorReader]]) -> TensorReader | None:
    """The weight of all experts, from a list of their gates and one of their ups, or one list: each stacked, then one below the
    other. None if a tensor is missing."""
    shapes = {(reader.shape, len(readers)) for readers in lists for reader in readers}
    if len(shapes) > 1 or not all(lists):
        return None
    (((height, *rest), num_experts),) = shapes

    def read(box: TensorSlice) -> torch.Tensor:
        _, rows, *columns = box
        joined = []
        for place, readers in enumerate(lists):
            begin, end = (min(max(row - place * height, 0), height) for row in (rows.start, rows.stop))
            if begin < end:
                joined.append(torch.stack([reader.read((slice(begin, end), *columns)) for reader in readers[box[0]]]))
        return torch.cat(joined, dim=1)

    return TensorReader((num_experts, height * len(lists), *rest), read)


def _read_part(file: BinaryIO, offset: int, dtype: torch.dtype, shape: tuple[int, ...], box: TensorSlice) -> torch.Tensor:
    """A part of a tensor whose bytes begin at `offset`: reads its full rows, then slices the other dimensions; of weights of
    experts (three dimensions) the rows of each expert."""
    first, end = (box[0].start, box[0].stop) if box else (0, 1)
    num_row_bytes = math.prod(shape[1:]) * dtype.itemsize
    num_bytes = (end - first) * num_row_bytes
    if len(shape) > 2 and box[1] != slice(0, shape[1]):
        places = (offset + place * num_row_bytes for place in range(first, end))
        return torch.stack([_read_part(file, place, dtype, shape[1:], box[1:]) for place in places])
    if not num_bytes:
        return torch.empty(end - first, *shape[1:], dtype=dtype)
    # Anonymous memory goes back to the system when freed; malloc would keep such buffers, separately for every thread.
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # Linux, if it has them: a page fault for 2 MiB, not 4 KiB, a third of the time
        buffer.madvise(mmap.MADV_HUGEPAGE)
    unread, place = memoryview(buffer), offset + first * num_row_bytes
    while unread:
        try:
            num_read, reason = os.preadv(file.fileno(), [unread], place), "it has become shorter"
        except OSError as error:
            num_read, reason = 0, str(error.strerror)
        if num_read == 0:
            raise UserError(f"{file.name} changed or went away while it was read ({reason}): start again when it is whole")
        unread, place = unread[num_read:], place + num_read
    part = torch.frombuffer(buffer, dtype=dtype).view(end - first, *shape[1:])
    return part[(slice(None), *box[1:])] if box else part[0]
