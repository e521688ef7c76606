"""Reads quantized weights: the tensors that hold codes and scales become one source of a weight's values.

These are bit for bit those that bitsandbytes, and transformers in bf16, make of the same files. A slice is made of the codes and
scales of its own rows; nothing else is read, except tables of at most 256 values.
"""

from __future__ import annotations

import json
import math

import torch

from toolkit.models.shard_reader import Box, Source, Sources


def dequantized(stored: Sources) -> Sources:
    """The tensors of files, with one source in place of those of each quantized weight."""
    sources = dict(stored)
    for build, endings in _FORMATS:
        for name in [key.removesuffix(endings[1]) for key in stored if key.endswith(endings[1])]:
            if all(name + ending in sources for ending in endings):
                sources[name] = build(*[sources.pop(name + ending) for ending in endings])
    return sources


def _build_nf4(codes: Source, absmax: Source, quant_map: Source, state: Source, *nested: Source) -> Source:
    """bitsandbytes' NF4: bytes of two codes, the first in the high bits, and a scale (`absmax`) per block of the flat weight."""
    about = json.loads(bytes(state.read((slice(0, state.shape[0]),)).tolist()))
    shape, width = tuple(about["shape"]), math.prod(about["shape"][1:])
    pairs = torch.cartesian_prod(*[quant_map.read((slice(0, 16),))] * 2)
    per_row = 2 * (-(-shape[0] * width // 2) // codes.shape[0])  # the bytes may be stored as another dtype (quant_storage)

    def read_nested(box: Box) -> torch.Tensor:
        scales = nested[1].read((slice(0, 256),))[absmax.read(box).int()]
        return scales * _spread(nested[0], box[0], about["nested_blocksize"]) + about["nested_offset"]

    scales = Source(absmax.shape, read_nested) if nested else absmax  # double quantization: the scales are codes, too

    def read(box: Box) -> torch.Tensor:
        begin, end = box[0].start * width, box[0].stop * width
        first = begin // per_row
        both = codes.read((slice(first, -(-end // per_row)),)).view(torch.uint8).int()
        values = pairs[both].flatten()[begin - first * per_row :][: end - begin]
        values *= _spread(scales, slice(begin, end), about["blocksize"])
        return values.to(getattr(torch, about["dtype"])).view(-1, *shape[1:])[:, *box[1:]]

    return Source(shape, read)


def _build_mxfp4(codes: Source, scales: Source) -> Source:
    """gpt-oss's experts: codes (experts, out, groups, 16), two per byte, are values (experts, in, out)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert

    shape = (codes.shape[0], 2 * math.prod(codes.shape[2:]), codes.shape[1])
    return Source(shape, lambda box: convert(codes.read(box[:1]), scales.read(box[:1]))[:, *box[1:]])


def _build_fp8(codes: Source, scales: Source) -> Source:
    """DeepSeek's fp8: a scale per block of 128 rows and columns; blocks at the edges are smaller."""
    if scales.shape != tuple(-(-size // 128) for size in codes.shape):
        return codes  # refused as codes without scales

    def read(box: Box) -> torch.Tensor:
        of_blocks = _spread(scales, box[0], 128).float().repeat_interleave(128, dim=1)
        return (codes.read(box[:1]).float() * of_blocks[:, : codes.shape[1]]).bfloat16()[:, *box[1:]]

    return Source(codes.shape, read)


def _spread(scales: Source, items: slice, size: int) -> torch.Tensor:
    """The scale of each of the `items`, where `size` neighbours share one."""
    first = items.start // size
    shared = scales.read((slice(first, -(-items.stop // size)),)).repeat_interleave(size, dim=0)
    return shared[items.start - first * size :][: items.stop - items.start]


_FORMATS = (
    (_build_nf4, ("", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".nested_absmax", ".nested_quant_map")),
    (_build_nf4, ("", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4")),
    (_build_mxfp4, ("_blocks", "_scales")),
    (_build_fp8, ("", "_scale_inv")),
)
"""What makes a source, and the endings of the names of what it is made of; no plain tensor's name ends as the second."""
