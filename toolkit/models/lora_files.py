"""Reads an adapter's folder, which has peft's files and a record of the base that the adapter belongs to.

    adapter_config.json          peft's config
    adapter_model.safetensors    the trainable tensors
    base.json                    where the base came from, and a hash of each of its tensors

Errors name the adapter by `what`, its setting and folder.
Names of parameters without → with the adapter (`…` is a module, `default` is peft's name of the adapter):

    ….weight → ….base_layer.weight                                     frozen; `codes` and `scales` if it is quantized
               ….lora_A.default.weight   ….lora_B.default.weight       trainable; `lora_embedding_A.default` of an embedding
               ….lora_magnitude_vector.default.weight                  trainable (DoRA)
    ….weight → ….token_adapter.base_layer.weight                       frozen (model.add_tokens)
               ….token_adapter.trainable_tokens_delta.default          trainable rows in place of the base's
    ….weight → ….original_module.weight                                frozen (adapter.modules_to_save)
               ….modules_to_save.default.weight                        trainable copy
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config.schema import AdapterConfig
from toolkit.errors import UserError, first_line
from toolkit.files.durable import check_readable, refuse_pointers
from toolkit.models.freeze import hash_tensor
from toolkit.models.quantized import weight_name
from toolkit.models.safetensors_index import ShardedReadUnsupported, open_files
from toolkit.models.tensor_reader import TensorReaders

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE, BASE_HASHES = "base.json", "bf16_sha256"

_TAKEN_OVER = (
    "r", "lora_alpha", "target_modules", "target_parameters", "exclude_modules", "modules_to_save", "use_rslora", "use_dora",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "ensure_weight_tying", "trainable_token_indices",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "init_lora_weights", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config",
)  # fmt: skip
"""Settings of an adapter's origin and initialization, which do not affect further training; dropout is the run's own."""
_KEEPING_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base's weights."""


def find_adapter(name_or_path: str) -> Path:
    """The folder of an adapter: a local one, or the hub's cache after a download; a `UserError` if it has no
    `adapter_config.json` or no safetensors weights, or may not be read."""
    from transformers.utils import cached_file

    what = f"adapter.name_or_path {name_or_path}"
    try:
        found = [cached_file(name_or_path, file) for file in (WEIGHTS_FILE, CONFIG_FILE)]
        cached_file(name_or_path, BASE_FILE, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        remedy = f"give a folder, or a hub id within reach, with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise UserError(f"{what} cannot be read ({first_line(error)}): {remedy}") from None
    folder = Path(str(found[0])).parent
    check_readable(what, folder)
    refuse_pointers(folder / file for file in (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE))
    return folder


def read_lora_config(folder: Path, config: AdapterConfig) -> LoraConfig:
    """peft's config of the adapter in `folder`, to continue training it, or to use it if `adapter.method` is none; a `UserError`
    if it is not a LoRA, its method is not that of `adapter.method`, or it has settings that are not supported."""
    from peft import LoraConfig

    what = f"adapter.name_or_path {config.name_or_path}"
    settings = read_json(folder / CONFIG_FILE, what)
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{what} is an adapter of type {settings.get('peft_type')}, and only LoRA, rsLoRA and DoRA are supported")
    method = "dora" if settings.get("use_dora") else "rslora" if settings.get("use_rslora") else "lora"
    if config.method not in ("none", method):
        raise UserError(f"{what} is a {method} adapter, but adapter.method is {config.method}: set adapter.method {method}")
    if (began := settings.get("init_lora_weights", True)) not in _KEEPING_THE_BASE:
        raise UserError(f"{what} began with init_lora_weights {began}, which changes the base: convert it to LoRA with peft")
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    for key, value in settings.items():
        if key not in (*_TAKEN_OVER, *_WITHOUT_EFFECT) and value and value != defaults.get(key):
            raise UserError(f"{what} has {key} {value!r} in its {CONFIG_FILE}, which is not supported")
    taken_over = {key: settings[key] for key in _TAKEN_OVER if key in settings}
    try:
        return LoraConfig(**taken_over, lora_dropout=config.dropout)
    except (TypeError, ValueError) as error:
        raise UserError(f"peft refuses the {CONFIG_FILE} of {what}: {' '.join(str(error).split())}") from None


def check_fits(model: PreTrainedModel, folder: Path, base: str, what: str) -> None:
    """Compare names and shapes of the trainable parameters with those in a folder's safetensors: the first one that is missing,
    unknown (as the embedding of a resized vocabulary, which the base must have) or of another shape is a `UserError`."""
    wanted = {name: tuple(model.get_parameter(own).shape) for name, own in file_names(model).items()}
    shapes = {name: reader.shape for name, reader in open_adapter(folder, what).items()}
    for name in sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        own = name.removeprefix("base_model.model.")
        how = f"has {own} of shape {shapes.get(name)} instead of {wanted.get(name)}"
        how = f"lacks {own}" if name not in shapes else f"also has {own}" if name not in wanted else how
        raise UserError(f"{what} does not fit {base}: it {how}")


def open_adapter(folder: Path, what: str) -> TensorReaders:
    """The tensors of an adapter's file, as `open_files`; of a dtype that is not read, they are a `UserError`."""
    try:
        return open_files([folder / WEIGHTS_FILE], what)
    except ShardedReadUnsupported as reason:
        raise UserError(f"{what}: {reason}, which is not supported: convert it to float32 or bfloat16") from None


def file_names(model: nn.Module) -> dict[str, str]:
    """Names in an adapter file, as peft writes them → names of the model's trainable parameters, aliases included."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_again = ".trainable_tokens_delta." in name and name != first_names[id(parameter)]  # tied, which peft stores once
        if parameter.requires_grad and not is_again:
            stored = name.replace(".modules_to_save.default.", ".")
            stored = re.sub(r"\.(lora_[AB])\.default\.", r".\1.", stored)
            stored = re.sub(r"\.(lora_embedding_[AB]|lora_magnitude_vector|\w+_delta)\.default(\.weight)?$", r".\1", stored)
            names[f"base_model.model.{stored}"] = first_names[id(parameter)]
    return names


def base_name(name: str) -> str | None:
    """The name of a parameter, or of the weight that it quantizes, in the model without the adapter; None for the adapter's own
    parameters."""
    if re.search(r"\.(lora_\w+|modules_to_save|trainable_tokens_delta)\.default(\.|$)", name):
        return None
    return re.sub(r"\.((token_adapter\.|base_layer\.)?base_layer|original_module)\.", ".", weight_name(name))


def hash_weight(weight: torch.Tensor) -> str:
    """The hash of an unsharded weight of a base: in bf16, so that it is the same for a base that is stored in fp32."""
    return hash_tensor(weight, torch.bfloat16)


def check_base(folder: Path, name_or_path: str, tensors: dict[str, str], what: str) -> None:
    """Refuse a base, of which `tensors` has each `hash_weight`, that differs from the one recorded in an adapter's folder, by a
    `UserError` with the first tensor; adapters saved by peft alone record none, in no `BASE_FILE`."""
    recorded = read_json(folder / BASE_FILE, what)
    theirs = recorded.get(BASE_HASHES)
    if not isinstance(theirs, dict):
        raise UserError(f"the {BASE_FILE} of {what} is not what an export writes: take it away, or export again")
    differing = sorted(name for name in theirs.keys() | tensors.keys() if theirs.get(name) != tensors.get(name))
    if differing:
        at = f" at revision {recorded['revision']}" if recorded.get("revision") else ""
        how = f"{len(differing)} tensors differ, {differing[0]} the first; its base was {recorded.get('name_or_path')}{at}"
        raise UserError(f"{what} was trained on another base than model.name_or_path {name_or_path}: {how}")


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file of the adapter `what`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the {file.name} of {what} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"the {file.name} of {what} is not a JSON object")
    return value
