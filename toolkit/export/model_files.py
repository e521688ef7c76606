"""Writes a model's folder as `save_pretrained` does, but casts and writes one tensor at a time: no rank's host memory holds the
full model.

Names, ties, conversions and the files that the tensors go to come from transformers' own functions, applied on the meta device
(transformers 5.23, modeling_utils.py:3510-3544). So each file's header is known before the first tensor is gathered.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from toolkit.checkpoint.dcp import Tensors
from toolkit.distributed.device import GIB
from toolkit.errors import UserError
from toolkit.models.config import WEIGHTS_INDEX
from toolkit.models.freeze import aliases
from toolkit.models.safetensors_index import DTYPES
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

_COMPARED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: equal bits are equal, also those of NaN."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def cast_on_meta(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy on the meta device with parameters in `dtype`, or in fp32 where transformers would load them so (T5's `wo`)."""
    model = copy_on_meta(model)
    plan = private("_get_dtype_plan", model)(dtype)
    kept = private("build_glob_alternation")(list(plan))[0] if plan else None
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept is not None and kept.search(name) else dtype)
    return model


class Cast:
    """Casts a model's weights to the `dtypes`, by their names, that they are exported in."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._num_weights = self._num_changed = 0
        self._largest = 0.0

    @torch.no_grad()
    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight in its exported dtype; a `UserError` if it is finite, and beyond that dtype's range."""
        dtype = self._dtypes[name]
        self._num_weights += weight.numel()
        if weight.dtype == dtype:
            return weight
        cast = weight.to(dtype)
        if bool((cast.isinf() & ~weight.isinf()).any()):
            largest = weight.abs().max()
            raise UserError(f"{name} has weights up to {largest:.3g}, more than {dtype_name(dtype)} can hold: take bfloat16")
        difference = (cast.to(weight.dtype) - weight).abs() if cast.itemsize < weight.itemsize else torch.zeros(1)
        self._num_changed += int((difference > 0).sum())
        self._largest = max(self._largest, float(difference.nan_to_num().max()))
        return cast

    def describe(self) -> str:
        """What was rounded."""
        names = sorted({dtype_name(dtype) for dtype in self._dtypes.values()})
        share = 100 * self._num_changed / max(1, self._num_weights)
        kept = f" ({' and '.join(names)})" if len(names) > 1 else ""
        return f"rounded {share:.1f} % of {self._num_weights:,} weights, each by at most {self._largest:.1e}{kept}"


class ModelFiles:
    """The files of a model's folder while they are written. For one rank; no function is collective."""

    def __init__(self, folder: Path, model: PreTrainedModel, max_shard_size: str) -> None:
        """`model` is on the meta device, with its buffers; `max_shard_size` is as in `save_pretrained`."""
        self._folder, self._model, self._max_shard_size = folder, model, max_shard_size
        self._places: dict[str, tuple[Path, int]] = {}
        """File and offset of each tensor that is not written yet."""
        self._stored_names: dict[str, str] = {}
        """First name of a parameter → the name under which it is saved; other aliases are not saved."""
        self._together: set[str] = set()
        """Names of parameters that are converted together."""
        self._collected: Tensors = {}

    def begin(self) -> None:
        """Write the configs, the index, the header of each weights file, and the buffers."""
        from huggingface_hub import split_state_dict_into_shards_factory
        from huggingface_hub.serialization import get_torch_storage_size

        # Names, without aliases; which tensors the files have.
        model = self._model
        ignored = set(private("_keys_to_ignore_on_save", model) or ())
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
        state = private("remove_tied_weights_from_state_dict")(state, model)
        first_names = {name: names[0] for names in aliases(model).values() for name in names}
        self._stored_names = {first_names.get(name, name): name for name in state}
        converted = private("revert_weight_conversion")(model, state)
        # What cannot be converted alone: here, one tensor of the model can become many, but not many one.
        self._together = {name for name, tensor in state.items() if not self._converts_alone({name: tensor}, converted)}
        if not self._converts_alone({name: state[name] for name in self._together}, converted):  # one of others' names
            self._together |= {name for name, tensor in state.items() if converted.get(name) is not tensor}
        if self._together:
            num_bytes = sum(state[name].nbytes for name in self._together)
            why = f"transformers saves tensors of {type(model).__name__} that are made of several, such as {min(self._together)}"
            what = f"{len(self._together)} tensors, {num_bytes / GIB:.1f} GiB, are collected in rank 0's host memory"
            logger.info(f"{what}: {why}")
        # Which file each goes to. Parts of one tensor count as that tensor and stay in one file.
        split = split_state_dict_into_shards_factory(
            converted,
            get_storage_size=get_torch_storage_size,
            get_storage_id=lambda tensor: private("_cdata", tensor.untyped_storage()),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self._max_shard_size,
        )
        # The files: all but the parameters' bytes.
        model.save_pretrained(self._folder, state_dict={})
        for file, names in split.filename_to_tensors.items():
            self._places |= _write_header(self._folder / file, {name: converted[name] for name in names})
        if split.is_sharded:
            about = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": about, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / WEIGHTS_INDEX).write_text(text, encoding="utf-8")
        for name, tensor in state.items():
            if not tensor.is_meta:
                self.add(name, tensor)

    @torch.no_grad()
    def add(self, name: str, weight: torch.Tensor) -> None:
        """Write a parameter, by its first name in the model, and read it back; a `RuntimeError` if the file does not hold what
        was written. What `save_pretrained` does not save is ignored. The weight is unsharded, on any device, in the dtype of the
        model on the meta device."""
        stored = self._stored_names.get(name)
        if stored in self._together:
            self._collected[stored] = weight.to("cpu", copy=True)
        elif stored is not None:
            # A copy: FSDP1 frees the memory that it gathered into, which torch forbids once numpy has seen it.
            self._write(private("revert_weight_conversion")(self._model, {stored: weight.to("cpu", copy=True)}))

    @torch.no_grad()
    def finish(self) -> None:
        """Write what is converted together, and load the folder on the meta device; a `RuntimeError` if a tensor was not written,
        or plain transformers misses one, or finds another or one of another shape."""
        if self._together:
            self._write(private("revert_weight_conversion")(self._model, self._collected))
            self._collected = {}
        if self._places:
            raise RuntimeError(f"{self._folder}: {min(self._places)} was not gathered")
        loader: Any = type(self._model)
        _, report = loader.from_pretrained(self._folder, device_map="meta", use_safetensors=True, output_loading_info=True)
        for kind, found in report.items():
            if found:
                raise RuntimeError(f"{self._folder} does not load: {kind.replace('_', ' ')} {sorted(map(str, found))[0]}")

    def _converts_alone(self, tensors: Tensors, converted: Tensors) -> bool:
        """Whether the files' tensors that are made of these are made of these only. Names that transformers changes in groups
        (Kimi-K2.5's tower: `fc1` to `fc0`, `fc2` to `fc1`) may be those of other tensors where one of the group is missing."""
        revert = private("revert_weight_conversion")
        try:
            alone = revert(self._model, dict(tensors))
        except Exception:  # an operation without its other tensors raises nothing more exact
            return False
        own = {id(tensor) for tensor in tensors.values()}
        return all(
            other in converted and (converted[other] is part if id(part) in own else converted[other].shape == part.shape)
            for other, part in alone.items()
        )

    def _write(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            path, begin = self._places.pop(name)
            content = tensor.contiguous().flatten()
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(content.view(torch.uint8).numpy().data)
            with safe_open(path, framework="pt") as file:
                read = file.get_tensor(name).flatten()
                same = _COMPARED_AS[content.itemsize]
                if read.dtype != content.dtype or not torch.equal(read.view(same), content.view(same)):
                    raise RuntimeError(f"{path}: {name} is not what was trained")


def _write_header(path: Path, tensors: Tensors) -> dict[str, tuple[Path, int]]:
    """Create a safetensors file without its content; returns where each tensor's bytes belong.

    Format and order are those of the safetensors library, which writes whole files only: the length of the header in 8 bytes,
    the header in JSON, padded to 8 bytes, then the tensors, those with the largest items first, by name.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in order:
        tensor = tensors[name]
        offsets[name] = begin = end
        end += tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: (path, 8 + len(text) + offset) for name, offset in offsets.items()}
