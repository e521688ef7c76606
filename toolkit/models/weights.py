"""The weights of a model: where each parameter's values are read, in files, in a state dict, or drawn from a seed.

The model stays on the meta device here: `parallel.wrap.shard_model` lets each rank read what it holds. Under FSDP2 those are its
shards; in a single process and under DDP the full model, on its device; under FSDP1 too, on the CPU, from where FSDP1 flattens
it. A base that is to be quantized is never held as it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config.schema import AdapterConfig, ModelConfig
from toolkit.distributed.comm import broadcast_object, on_all_ranks, on_rank_0
from toolkit.distributed.rng import derive_seed
from toolkit.errors import UserError
from toolkit.models.freeze import aliases
from toolkit.models.load import build_on_meta, from_files, grow_vocabulary, load_model
from toolkit.models.lora_files import BASE_FILE, base_name, check_base, file_names, find_adapter, open_adapter
from toolkit.models.quantized import QuantizedLinear, QuantizedWeight, dequantize, find_scales, quantize, weight_name
from toolkit.models.safetensors_index import Match, ShardedReadUnsupported, check_loaded, match_files, untie_differing
from toolkit.models.tensor_reader import (
    PassingHash,
    TensorReader,
    TensorReaders,
    TensorSlice,
    allocate,
    fill_buffers,
    hash_readers,
    pieces,
    state_readers,
)
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from toolkit.objectives.objective import Objective


def open_weights(
    config: ModelConfig,
    model_config: PretrainedConfig,
    objective: Objective,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    seed: int = 0,
    exported: Path | None = None,
    in_full: Callable[[str], None] = lambda reason: None,
) -> tuple[PreTrainedModel, TensorReaders]:
    """The model on the meta device with its buffers filled, and readers of its parameters under all their names; weights that do
    not load, or are not the model's, are a `UserError` on every rank. Collective.

    What cannot be read in parts, or is drawn from `seed`, each rank loads or draws in full, as transformers does; `in_full` gets
    the reason before. `exported` has weights in place of the model's own (`model.init_from`); `dtype` as in `load.load_model`.
    """

    def match_parts() -> tuple[PreTrainedModel, TensorReaders, Match]:
        if config.from_scratch:
            raise ShardedReadUnsupported("model.from_scratch draws them")
        if not type(skeleton).__module__.startswith("transformers."):
            raise ShardedReadUnsupported("its code is not transformers' own")
        if getattr(type(model_config), "extra_files", ()):
            raise ShardedReadUnsupported("some of its weights lie in files of another kind")
        # Every parameter must be in the files, in its shape.
        model = build_on_meta(config, model_config, objective, dtype)
        if private("_get_dtype_plan", model)(dtype):
            raise ShardedReadUnsupported("transformers keeps some of its weights in fp32")
        files, match = match_files(model, config.name_or_path, config.revision, f"model.name_or_path {config.name_or_path}")
        check_loaded(objective, model, config.name_or_path, match)
        if match.missing:
            raise ShardedReadUnsupported("its head is new, and drawn in full")
        if exported is not None:
            grow_vocabulary(model, config)  # it has rows for the tokens
            files, match = match_files(model, str(exported), None, f"model.init_from {exported}")
            _check_fits(model, exported, match)
        return model, files, match

    def load() -> PreTrainedModel:
        model = load_model(config, model_config, objective, seed, dtype)
        if exported is None:
            return model
        allocate(model, torch.device("meta"))
        grow_vocabulary(model, config)  # it has rows for the tokens
        options = {"config": model.config, "dtype": torch.float32}
        other, match = from_files(type(model), str(exported), f"model.init_from {exported}", options, lambda: model)
        _check_fits(model, exported, match)
        other.name_or_path = other.config.name_or_path = model.name_or_path
        return other

    try:
        model, files, match = on_all_ranks(match_parts)
        readers = _match_readers(model, files, match)
    except ShardedReadUnsupported as reason:
        in_full(str(reason))
        model = on_all_ranks(load)
        readers = state_readers(dict(model.named_parameters(remove_duplicate=False)))
        allocate(model, torch.device("meta"))  # the readers hold the values
    return model, _grow(model, readers, config)


def _match_readers(model: PreTrainedModel, files: TensorReaders, match: Match) -> TensorReaders:
    """Readers of the parameters of a model in files, under all their names; fills its buffers. Collective."""
    untie_differing(model, files, match)
    tensors = {name: files[stored] for name, stored in match.tensors.items()}
    on_all_ranks(lambda: fill_buffers(model, tensors))
    # A tied weight is read from a name that is stored.
    readers: TensorReaders = {}
    names_of = aliases(model)
    for parameter in model.parameters():
        names = names_of[id(parameter)]
        stored = next(name for name in names if name in tensors)
        readers |= dict.fromkeys(names, tensors[stored].to(parameter.dtype))
    return readers


def complete_readers(
    model: PreTrainedModel, weights: TensorReaders, config: AdapterConfig, base: ModelConfig, seed: int
) -> TensorReaders:
    """The reader of each parameter of the adapted model, and of each weight that is quantized, by the name of the plain layer's;
    `weights` are the base's, from `open_weights`. Collective.

    A new adapter does not change outputs: A is drawn from `seed`, B is zero, and DoRA's magnitudes are the base's norms. An
    existing one that has another base, or weights that cannot be read, is a `UserError` on every rank."""
    # An existing adapter must belong to this base.
    name_or_path = config.name_or_path
    folder = on_all_ranks(lambda: find_adapter(name_or_path)) if name_or_path else None
    if folder is not None:
        what = f"adapter.name_or_path {name_or_path}"
        if broadcast_object((folder / BASE_FILE).is_file()):
            names = {own for name, _ in model.named_parameters() if (own := base_name(name)) is not None}
            hashes = hash_readers(weights, dict.fromkeys(names, torch.bfloat16))  # as `lora_files.hash_weight`
            on_all_ranks(lambda: check_base(folder, base.name_or_path, hashes, what))
        files = open_adapter(folder, what)
        stored = {own: files[name].to(torch.float32) for name, own in file_names(model).items()}
    # Each parameter comes from the base, the existing adapter's file, or a seed.
    readers = {}
    for name, parameter in model.named_parameters():
        own = base_name(name)
        layer_name, _, held = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        if own is not None and isinstance(layer, QuantizedWeight) and held != "bias":
            make = find_scales if held == "scales" else partial(quantize, kind=layer.kind)
            readers[name] = _by_rows(weights[own], parameter.shape, make)
            readers[weight_name(name)] = weights[own]  # hashed too: an export names the base by it
        elif own is not None:
            readers[name] = weights[own]
        elif folder is not None:
            readers[name] = stored[name]
        elif ".trainable_tokens_delta." in name:
            readers[name] = _token_rows(model, name, weights)
        elif ".modules_to_save." in name:
            readers[name] = weights[name.replace(".modules_to_save.default.", ".")]
        elif ".lora_magnitude_vector." in name:
            readers[name] = _norms(model, name, weights)
        else:
            draw = partial(draw_new, name, parameter.shape, seed)  # small: each read makes all of it
            readers[name] = TensorReader(tuple(parameter.shape), lambda box, draw=draw: draw()[box])  # type: ignore[misc]
    return readers


def draw_new(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Values of a LoRA parameter of this name in the adapted model, in fp32, drawn as peft does, but from its own seed."""
    values = torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        nn.init.normal_(values, generator=generator)
    return values


def hash_frozen(
    model: nn.Module, readers: TensorReaders, *, on_each_rank: bool = False, while_read: bool = False
) -> Callable[[], dict[str, str]]:
    """`freeze.hash_tensor` of each frozen parameter in its own dtype, which checkpoints record instead of its values, and
    `lora_files.hash_weight` of each weight that is quantized; as `hash_readers`. Call what this returns for them. Collective.

    With `while_read`, what a rank reads in full of `readers`, in `fill_parameters`, is hashed there: they are known after it.
    """
    dtypes = dict.fromkeys(readers, torch.bfloat16) | {name: p.dtype for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: dtype for name, dtype in dtypes.items() if name not in trained}
    read = [name for name, _ in model.named_parameters() if while_read and name in frozen]
    passing = {name: PassingHash(readers[name], frozen.pop(name)) for name in read}
    readers |= {name: each.reader for name, each in passing.items()}
    hashes = hash_readers(readers, frozen, on_each_rank=on_each_rank)
    return lambda: dict(sorted((hashes | {name: each.hexdigest() for name, each in passing.items()}).items()))


def _check_fits(model: PreTrainedModel, exported: Path, match: Match) -> None:
    """Refuse weights for `model.init_from` by the first name that they lack, have another shape of, or have too much."""
    wrong = {"lacks": match.missing, "has another shape of": match.other_shapes, "also has": match.unknown}
    for what, names in wrong.items():
        if names:
            raise UserError(f"model.init_from {exported} does not fit {model.name_or_path}: it {what} {min(names)}")


def _grow(model: PreTrainedModel, readers: TensorReaders, config: ModelConfig) -> TensorReaders:
    """The readers, of those parameters that grow by `model.add_tokens` with the new rows; rank 0 reads each once, for its mean
    row. Collective."""
    names = on_all_ranks(lambda: grow_vocabulary(model, config))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in names}
    rows = on_rank_0(lambda: {name: _mean_row(readers[name]) for name in shapes})
    grown = {name: _with_rows(readers[name], shapes[name], rows[name]) for name in shapes}
    return readers | {name: grown[names[0]] for names in aliases(model).values() if names[0] in grown for name in names}


def _mean_row(reader: TensorReader) -> torch.Tensor:
    """The mean of a weight's rows in fp32, of their values in bf16: it is the same of a base that is stored in either."""
    total: Any = sum(reader.read(piece).bfloat16().double().sum(dim=0) for piece in pieces(reader.shape))
    return (total / reader.shape[0]).float()


def _with_rows(reader: TensorReader, shape: tuple[int, ...], row: torch.Tensor) -> TensorReader:
    """`reader` with `row` repeated below it, to `shape`."""

    def read(box: TensorSlice) -> torch.Tensor:
        rows, *rest = box
        begin, end = (min(place, reader.shape[0]) for place in (rows.start, rows.stop))
        old, new = reader.read((slice(begin, end), *rest)), row[tuple(rest)]
        return torch.cat([old, new.to(old.dtype).expand(rows.stop - rows.start - len(old), *new.shape)])

    return TensorReader(shape, read)


def _token_rows(model: nn.Module, name: str, weights: TensorReaders) -> TensorReader:
    """The base's rows of the tokens that an adapter trains."""
    module_name = name.partition(".trainable_tokens_delta.")[0]
    layer: Any = model.get_submodule(module_name)
    ids, weight = layer.token_indices["default"], weights[str(base_name(f"{module_name}.base_layer.weight"))]
    boxes = [(slice(place, place + 1), slice(0, weight.shape[1])) for place in ids]
    return TensorReader((len(ids), weight.shape[1]), lambda box: torch.cat([weight.read(row) for row in boxes])[box])


def _norms(model: nn.Module, name: str, weights: TensorReaders) -> TensorReader:
    """DoRA's initial magnitudes in fp32: the norm of each output of a base layer's weight; a part of them reads only its own rows
    or columns of the base."""
    module_name = name.partition(".lora_magnitude_vector.")[0]
    base: Any = model.get_submodule(module_name).base_layer
    weight = weights[str(base_name(f"{module_name}.base_layer.weight"))]

    def of_rows(rows: torch.Tensor) -> torch.Tensor:
        if isinstance(base, QuantizedLinear):
            rows = dequantize(quantize(rows, base.kind), find_scales(rows), base.dtype)
        return torch.linalg.vector_norm(rows.float(), dim=1)

    if isinstance(base, nn.Linear):
        return _by_rows(weight, weight.shape[:1], of_rows)

    def read(box: TensorSlice) -> torch.Tensor:  # Conv1D and embeddings have their outputs last
        (part,) = box
        rows = torch.cat([weight.read((rows, part)) for rows, _ in pieces(weight.shape)])
        return torch.linalg.vector_norm(rows.float(), dim=0)

    return TensorReader(weight.shape[1:], read)


def _by_rows(weight: TensorReader, shape: tuple[int, ...], make: Callable[[torch.Tensor], torch.Tensor]) -> TensorReader:
    """The reader of what `make` computes of each row of a weight, of which it gets a piece at a time."""

    def read(box: TensorSlice) -> torch.Tensor:
        *rows, columns = *box[: len(weight.shape) - 1], slice(0, weight.shape[-1])
        size = tuple(part.stop - part.start for part in (*rows, columns))
        starts = [part.start for part in (*rows, columns)]
        boxes = [tuple(slice(at + p.start, at + p.stop) for at, p in zip(starts, piece, strict=True)) for piece in pieces(size)]
        made = torch.cat([make(weight.read(box)).flatten(0, len(rows) - 1) for box in boxes])  # of experts, row after row
        return made.unflatten(0, size[:-1])[(..., *box[len(rows) :])]

    return TensorReader(tuple(shape), read)
