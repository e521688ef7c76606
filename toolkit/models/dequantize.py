"""Reads quantized weights: the tensors that hold codes and scales become one reader of a weight's values.

These are bit for bit those that bitsandbytes, and transformers in bf16, make of the same files. A slice is made of the codes and
scales of its own rows; nothing else is read, except tables of at most 256 values.
"""

import json
import math
from collections.abc import Callable
from functools import partial

import torch

from toolkit.errors import UserError
from toolkit.models.tensor_reader import TensorReader, TensorReaders, TensorSlice

NF4_STATE = ".quant_state.bitsandbytes__nf4"
Take = Callable[[str], TensorReader]
"""Takes the tensor of a weight whose name has this end."""


def dequantized(stored: TensorReaders, what: str) -> TensorReaders:
    """The tensors of files, with one reader in place of those of each quantized weight, of which a missing one is a `UserError`;
    `what` is the files' setting and path."""
    readers = dict(stored)

    def take(name: str, ending: str) -> TensorReader:
        if name + ending not in readers:
            raise UserError(f"{name} of {what} is stored in codes, but not its {name}{ending}: save the model again")
        return readers.pop(name + ending)

    for ending, build in _FORMATS.items():
        for name in [key.removesuffix(ending) for key in stored if key.endswith(ending)]:
            readers[name] = build(partial(take, name))
    return readers


def _build_nf4(take: Take) -> TensorReader:
    """bitsandbytes' NF4: bytes of two codes, the first in the high bits, and a scale (`absmax`) per block of the flat weight."""
    state, codes, absmax, quant_map = (take(ending) for ending in (NF4_STATE, "", ".absmax", ".quant_map"))
    about = json.loads(bytes(state.read_all().tolist()))
    shape, width = tuple(about["shape"]), math.prod(about["shape"][1:])
    pairs = torch.cartesian_prod(*[quant_map.read_all()] * 2)
    per_row = 2 * (-(-shape[0] * width // 2) // codes.shape[0])  # the bytes may be stored as another dtype (quant_storage)

    scales = absmax
    if "nested_blocksize" in about:  # double quantization: the scales are codes, too
        of_scales, values_of_codes = take(".nested_absmax"), take(".nested_quant_map")

        def read_nested(box: TensorSlice) -> torch.Tensor:
            values = values_of_codes.read_all()[absmax.read(box).int()]
            return values * _spread(of_scales, box[0], about["nested_blocksize"]) + about["nested_offset"]

        scales = TensorReader(absmax.shape, read_nested)

    def read(box: TensorSlice) -> torch.Tensor:
        begin, end = box[0].start * width, box[0].stop * width
        first = begin // per_row
        both = codes.read((slice(first, -(-end // per_row)),)).view(torch.uint8).int()
        values = pairs[both].flatten()[begin - first * per_row :][: end - begin]
        values *= _spread(scales, slice(begin, end), about["blocksize"])
        return values.to(getattr(torch, about["dtype"])).view(-1, *shape[1:])[:, *box[1:]]

    return TensorReader(shape, read)


def _build_mxfp4(take: Take) -> TensorReader:
    """gpt-oss's experts: codes (experts, out, groups, 16), two per byte, are values (experts, in, out)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert

    codes, scales = take("_blocks"), take("_scales")
    shape, width = (codes.shape[0], 2 * math.prod(codes.shape[2:]), codes.shape[1]), 2 * codes.shape[3]

    def read(box: TensorSlice) -> torch.Tensor:
        experts, rows, columns = box
        first = rows.start // width
        part = (experts, slice(0, codes.shape[1]), slice(first, -(-rows.stop // width)))
        values = convert(codes.read((*part, slice(0, codes.shape[3]))), scales.read(part))
        return values[:, rows.start - first * width : rows.stop - first * width, columns]

    return TensorReader(shape, read)


def _build_fp8(take: Take) -> TensorReader:
    """DeepSeek's fp8: a scale per block of 128 rows and columns; blocks at the edges are smaller."""
    codes, scales = take(""), take("_scale_inv")
    if scales.shape != tuple(-(-size // 128) for size in codes.shape):
        return codes  # refused as codes without scales

    def read(box: TensorSlice) -> torch.Tensor:
        of_blocks = _spread(scales, box[0], 128).float().repeat_interleave(128, dim=1)
        return (codes.read(box[:1]).float() * of_blocks[:, : codes.shape[1]]).bfloat16()[:, *box[1:]]

    return TensorReader(codes.shape, read)


def _spread(scales: TensorReader, items: slice, size: int) -> torch.Tensor:
    """The scale of each of the `items`, where `size` neighbours share one."""
    first = items.start // size
    shared = scales.read((slice(first, -(-items.stop // size)),)).repeat_interleave(size, dim=0)
    return shared[items.start - first * size :][: items.stop - items.start]


_FORMATS = {NF4_STATE: _build_nf4, "_blocks": _build_mxfp4, "_scale_inv": _build_fp8}
"""The end of the name of a tensor that only a format has → what makes a reader of the tensors of a weight."""
