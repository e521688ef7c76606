"""Sharded loading: builds a model on the meta device, with sources from which each rank reads its shards.

The result is bit for bit that of `load.load_model` and `lora.add_adapter` on a fully loaded model. It serves FSDP2: DDP and
single process need the full model on every rank anyway, and FSDP1 flattens it there. A base that is to be quantized is read so on
each rank, except under FSDP1: nothing ever holds the base as it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config.schema import AdapterConfig, ModelConfig
from toolkit.config.task import Task
from toolkit.distributed.comm import broadcast_object, on_all_ranks, on_rank_0
from toolkit.errors import UserError
from toolkit.models.freeze import aliases
from toolkit.models.load import build_on_meta, check_loaded, grow_vocabulary, mean_row
from toolkit.models.lora import draw_new, magnitudes
from toolkit.models.lora_files import BASE_FILE, WEIGHTS_FILE, base_name, check_base, file_names, find_adapter
from toolkit.models.quantized import QuantizedLinear, QuantizedWeight, dequantize, find_scales, quantize, weight_name
from toolkit.models.safetensors_index import Match, WholeOnly, find_weight_files, match_names, open_files, untie_differing
from toolkit.models.shard_reader import Box, Source, Sources, hash_sources, pieces
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def open_weights(
    config: ModelConfig,
    model_config: PretrainedConfig,
    task: Task,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    init_from: Path | None,
) -> tuple[PreTrainedModel, Sources]:
    """The model on the meta device with its buffers filled, and its parameters' sources under all their names. Collective.

    Args:
        dtype: as in `load.load_model`.
        init_from: an exported model or a checkpoint whose weights replace the model's own.

    Raises:
        WholeOnly: some weights cannot be read in parts; on every rank.
        UserError: the weights are not the model's; on every rank.
    """

    def begin() -> tuple[PreTrainedModel, Sources, Match]:
        if not type(skeleton).__module__.startswith("transformers."):
            raise WholeOnly("its code is not transformers' own")
        if getattr(type(model_config), "extra_files", ()):
            raise WholeOnly("some of its weights lie in files of another kind")
        if init_from is not None and not (init_from / "config.json").is_file():
            raise WholeOnly(f"model.init_from {init_from} is a checkpoint, which says what it lacks only when it is loaded")
        # Every parameter must be in the files, in its shape.
        model = build_on_meta(config, model_config, task, dtype)
        if private("_get_dtype_plan", model)(dtype):
            raise WholeOnly("transformers keeps some of its weights in fp32")
        files, match = _match(model, config.name_or_path, config.revision, f"model.name_or_path {config.name_or_path}")
        check_loaded(task, model, config.name_or_path, match)
        if match.missing:
            raise WholeOnly("its head is new, and drawn in full")
        if init_from is not None:
            grow_vocabulary(model, config)  # it has rows for the tokens
            files, match = _match(model, str(init_from), None, f"model.init_from {init_from}")
            if match.unknown:
                raise WholeOnly(f"model.init_from {init_from} also has {match.unknown[0]}")
            for names, what in ((match.missing, "lacks"), (sorted(match.other_shapes), "has another shape of")):
                if names:
                    raise UserError(f"model.init_from {init_from} does not fit {model.name_or_path}: it {what} {names[0]}")
        return model, files, match

    model, files, match = on_all_ranks(begin)
    untie_differing(model, files, match)

    # Buffers are not sharded: every rank reads all of them.
    def fill_buffers() -> None:
        for name, buffer in model.named_buffers():
            if name in match.tensors:
                for piece in pieces(tuple(buffer.shape)):
                    buffer[piece].copy_(files[match.tensors[name]].read(piece))

    on_all_ranks(fill_buffers)
    sources = _sources_of(model, files, match)
    return model, sources | _grow(model, sources, config)


def complete_sources(model: PreTrainedModel, weights: Sources, config: AdapterConfig, base: ModelConfig, seed: int) -> Sources:
    """The source of each parameter of the adapted model, and of each weight that is quantized, by the name of the plain layer's;
    `weights` are the base's, from `open_weights`. An existing adapter that has another base, or weights that cannot be read, is a
    `UserError` on every rank. Collective."""
    # An existing adapter must belong to this base.
    name_or_path = config.name_or_path
    folder = on_all_ranks(lambda: find_adapter(name_or_path)) if name_or_path else None
    if folder is not None:
        what = f"adapter.name_or_path {name_or_path}"
        if broadcast_object((folder / BASE_FILE).is_file()):
            names = {own for name, _ in model.named_parameters() if (own := base_name(name)) is not None}
            hashes = hash_sources(weights, dict.fromkeys(names, torch.bfloat16))  # as `lora_files.hash_base`
            on_all_ranks(lambda: check_base(folder, base.name_or_path, hashes, what))
        try:
            files = open_files([folder / WEIGHTS_FILE], what)
        except WholeOnly as reason:
            raise UserError(f"{what}: {reason}, which is not supported: convert it to float32 or bfloat16") from None
        stored = {own: files[name].to(torch.float32) for name, own in file_names(model).items()}
    # Each parameter comes from the base, the existing adapter's file, or a seed.
    sources = {}
    for name, parameter in model.named_parameters():
        own = base_name(name)
        layer_name, _, held = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        if own is not None and isinstance(layer, QuantizedWeight) and held != "bias":
            make = find_scales if held == "scales" else partial(quantize, kind=layer.kind)
            sources[name] = _by_rows(weights[own], parameter.shape, make)
            sources[weight_name(name)] = weights[own]  # hashed too: an export names the base by it
        elif own is not None:
            sources[name] = weights[own]
        elif folder is not None:
            sources[name] = stored[name]
        elif ".trainable_tokens_delta." in name:
            sources[name] = _token_rows(model, name, weights)
        elif ".modules_to_save." in name:
            sources[name] = weights[name.replace(".modules_to_save.default.", ".")]
        elif ".lora_magnitude_vector." in name:
            sources[name] = _norms(model, name, weights)
        else:
            draw = partial(draw_new, name, parameter.shape, seed)  # small: each read makes all of it
            sources[name] = Source(tuple(parameter.shape), lambda box, draw=draw: draw()[box])  # type: ignore[misc]
    return sources


def hash_frozen(model: nn.Module, sources: Sources) -> dict[str, str]:
    """`freeze.hash_frozen` of a model whose weights are still in files: the same hashes, and those of the weights that are
    quantized, as `lora_files.hash_weight` has them. Collective."""
    dtypes = dict.fromkeys(sources, torch.bfloat16) | {name: p.dtype for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return hash_sources(sources, {name: dtype for name, dtype in dtypes.items() if name not in trained})


def _match(model: PreTrainedModel, name_or_path: str, revision: str | None, what: str) -> tuple[Sources, Match]:
    named = getattr(model.config, "transformers_weights", None)
    files = open_files(find_weight_files(name_or_path, revision, named), what)
    match = match_names(model, files, f"the weights of {what}")
    computed = private("_keys_to_ignore_on_load_missing", model) or ()
    for name in match.missing:
        if any(re.search(pattern, name) for pattern in computed):
            raise WholeOnly(f"{name} is in no file, but computed")
    return files, match


def _sources_of(model: PreTrainedModel, files: Sources, match: Match) -> Sources:
    """Each parameter's source, under all its names; a tied weight is read from a name that is stored."""
    names_of = aliases(model)
    sources: Sources = {}
    for parameter in model.parameters():
        names = names_of[id(parameter)]
        stored = next(name for name in names if name in match.tensors)
        sources |= dict.fromkeys(names, files[match.tensors[stored]].to(parameter.dtype))
    return sources


def _grow(model: PreTrainedModel, sources: Sources, config: ModelConfig) -> Sources:
    """The sources of the parameters that grow by `model.add_tokens`; rank 0 reads each once, for its mean row. Collective."""
    old_rows = on_all_ranks(lambda: grow_vocabulary(model, config))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in old_rows}
    rows = on_rank_0(lambda: {name: mean_row(sources[name].shape, sources[name].read) for name in shapes})
    grown = {name: _with_rows(sources[name], shapes[name], rows[name]) for name in shapes}
    return {name: grown[names[0]] for names in aliases(model).values() if names[0] in grown for name in names}


def _with_rows(source: Source, shape: tuple[int, ...], row: torch.Tensor) -> Source:
    """`source` with `row` repeated below it, to `shape`."""

    def read(box: Box) -> torch.Tensor:
        rows, *rest = box
        begin, end = (min(place, source.shape[0]) for place in (rows.start, rows.stop))
        old, new = source.read((slice(begin, end), *rest)), row[tuple(rest)]
        return torch.cat([old, new.to(old.dtype).expand(rows.stop - rows.start - len(old), *new.shape)])

    return Source(shape, read)


def _token_rows(model: nn.Module, name: str, weights: Sources) -> Source:
    """The base's rows of the tokens that an adapter trains."""
    module_name = name.partition(".trainable_tokens_delta.")[0]
    layer: Any = model.get_submodule(module_name)
    ids, weight = layer.token_indices["default"], weights[str(base_name(f"{module_name}.base_layer.weight"))]
    boxes = [(slice(place, place + 1), slice(0, weight.shape[1])) for place in ids]
    return Source((len(ids), weight.shape[1]), lambda box: torch.cat([weight.read(row) for row in boxes])[box])


def _norms(model: nn.Module, name: str, weights: Sources) -> Source:
    """DoRA's magnitudes (`lora.magnitudes`); a part of them reads only its own rows or columns of the base."""
    module_name = name.partition(".lora_magnitude_vector.")[0]
    base: Any = model.get_submodule(module_name).base_layer
    weight = weights[str(base_name(f"{module_name}.base_layer.weight"))]

    def of_rows(rows: torch.Tensor) -> torch.Tensor:
        if isinstance(base, QuantizedLinear):
            rows = dequantize(quantize(rows, base.kind), find_scales(rows), base.dtype)
        return magnitudes(base, rows)

    if isinstance(base, nn.Linear):
        return _by_rows(weight, weight.shape[:1], of_rows)

    def read(box: Box) -> torch.Tensor:
        (part,) = box
        return magnitudes(base, torch.cat([weight.read((rows, part)) for rows, _ in pieces(weight.shape)]))

    return Source(weight.shape[1:], read)


def _by_rows(weight: Source, shape: tuple[int, ...], make: Callable[[torch.Tensor], torch.Tensor]) -> Source:
    """The source of what `make` computes of each row of a weight, of which it gets a piece at a time."""

    def read(box: Box) -> torch.Tensor:
        rows, *rest = box
        if len(weight.shape) > 2:  # of experts, one at a time
            own_rows, *rest = rest
            boxes: list[Box] = [(slice(n, n + 1), own_rows, slice(0, weight.shape[2])) for n in range(rows.start, rows.stop)]
            return torch.cat([make(weight.read(box)) for box in boxes])[(slice(None), slice(None), *rest)]
        size = (rows.stop - rows.start, weight.shape[1])
        boxes = [(slice(rows.start + part.start, rows.start + part.stop), columns) for part, columns in pieces(size)]
        return torch.cat([make(weight.read(box)) for box in boxes])[(slice(None), *rest)]

    return Source(tuple(shape), read)
