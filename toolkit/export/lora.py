"""Writes an adapter for plain peft, and merges adapted weights one at a time for plain transformers."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from toolkit.checkpoint.dcp import Tensors
from toolkit.export.compare import reload
from toolkit.models.freeze import aliases
from toolkit.models.load import num_token_embeddings, resize_rows
from toolkit.models.lora_files import BASE_FILE, BASE_HASHES, WEIGHTS_FILE, base_name, file_names
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.parallel.gather import assign_parameters
from toolkit.private import ASKED_BY_PEFT

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def write_adapter(folder: Path, skeleton: PreTrainedModel, weights: Tensors, base_hashes: dict[str, str]) -> None:
    """Write the trained tensors as peft does, and `base.json`. `weights` are the unsharded trainable parameters by name, fp32 on
    the CPU, `base_hashes` those of `lora_files.hash_weight`; the skeleton has the adapter, and its weights are not read."""
    lora: Any = copy.deepcopy(skeleton.peft_config["default"])  # type: ignore[index]
    lora.inference_mode = True
    # On loading, peft ties only modules that `modules_to_save` names.
    lora.modules_to_save = sorted({*(lora.modules_to_save or ()), *(getattr(lora, "modules_to_tie", None) or ())}) or None
    if not isinstance(lora.target_modules, str):
        lora.target_modules = sorted(lora.target_modules)
    lora.target_parameters = sorted(lora.target_parameters or ()) or None
    lora.save_pretrained(str(folder))
    # Clones, because safetensors refuses tensors that share memory, and peft stores a tied weight under all its names.
    stored = {stored: weights[name].clone().contiguous() for stored, name in file_names(skeleton).items()}
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    base = {"name_or_path": lora.base_model_name_or_path, "revision": lora.revision, BASE_HASHES: base_hashes}
    (folder / BASE_FILE).write_text(json.dumps(base, indent=1), encoding="utf-8")


def compare_adapter(folder: Path, skeleton: PreTrainedModel, weights: Tensors) -> None:
    """Load the folder with plain peft onto its base on the meta device, and compare the file's tensors bit for bit: a
    `RuntimeError` names the first weight that peft misses or does not know, or that has another value."""
    from peft import load_peft_weights, set_peft_model_state_dict

    on_meta = load_adapter(folder, skeleton, torch.device("meta"))
    stored = load_peft_weights(str(folder), device="cpu")
    report: Any = set_peft_model_state_dict(on_meta, stored, low_cpu_mem_usage=True)
    own = [names for names in aliases(on_meta).values() if base_name(names[0]) is None]
    missing = [names[0] for names in own if {*names} <= {*report.missing_keys}]  # peft stores tied rows under one name
    for what, names in (("misses", missing), ("does not know", report.unexpected_keys)):
        if names:
            raise RuntimeError(f"{folder}: peft {what} {names[0]}")
    for stored_name, name in file_names(skeleton).items():
        if not torch.equal(stored[stored_name], weights[name]):
            raise RuntimeError(f"{folder}: {name} is not what was trained")


def load_adapter(folder: Path, skeleton: PreTrainedModel, device: torch.device) -> nn.Module:
    """The adapter in `folder` on its base from its origin, loaded by plain peft in fp32 on `device`."""
    from peft import PeftModel

    lora: Any = skeleton.peft_config["default"]  # type: ignore[index]
    base: Any = reload(skeleton, lora.base_model_name_or_path, device, revision=lora.revision or "main")
    if num_token_embeddings(base) < num_token_embeddings(skeleton):
        resize_rows(base, num_token_embeddings(skeleton))  # the adapter has the new rows
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ASKED_BY_PEFT)
        return PeftModel.from_pretrained(base, str(folder), low_cpu_mem_usage=device.type == "meta").eval()


class Merge:
    """Merges an adapter into its base, one weight at a time: by peft in fp32. `model` has the base's dtype."""

    def __init__(self, skeleton: PreTrainedModel, adapter: Tensors) -> None:
        """`skeleton` has the adapter and no codes, on the meta device; `adapter` has what trained, whole, in fp32 on the CPU."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper

        self._skeleton, self._adapter = skeleton, adapter
        frozen = (parameter.dtype for name, parameter in skeleton.named_parameters() if base_name(name))
        stored = min(frozen, key=lambda dtype: dtype.itemsize)
        # The plain model on the meta device. Its parameters are the adapted model's, under other names.
        model: Any = copy_on_meta(skeleton)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in list(model.named_modules()):
            if isinstance(module, AuxiliaryTrainingWrapper):
                saved = getattr(module, "modules_to_save", None)
                model.set_submodule(name, saved["default"] if saved else module.token_adapter.base_layer)
            elif isinstance(module, BaseTunerLayer) and not name.endswith((".token_adapter", ".base_layer")):
                model.set_submodule(name, module.get_base_layer())
        self._merged_names = {names[id(parameter)]: name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(stored)
        del model.peft_config
        self.model: PreTrainedModel = model
        """The merged model on the meta device."""

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and value in the merged model, in fp32 where it was merged, of a parameter of the adapted model, unsharded; None
        for what the merged one does not have."""
        if name not in self._merged_names:
            return None
        weight = weight.to("cpu")
        layer_name, _, held = name.rpartition(".")
        while layer_name.endswith(".base_layer"):  # adapters of the weights of one layer's experts are nested
            layer_name = layer_name.removesuffix(".base_layer")
            layer: Any = self._skeleton.get_submodule(layer_name)
            if getattr(layer, "parameter_name", "weight") == held:
                layer = copy.deepcopy(layer)
                own = {name: self._adapter.get(f"{layer_name}.{name}", parameter) for name, parameter in layer.named_parameters()}
                assign_parameters(layer, {**own, name.removeprefix(f"{layer_name}."): weight.to(torch.float32, copy=True)})
                layer.merge()
                weight = getattr(layer.get_base_layer(), held)
        return self._merged_names[name], weight


def coarsest(model: PreTrainedModel, computed: torch.dtype, stored: torch.dtype | None = None) -> torch.dtype:
    """The coarsest dtype that a model computed in or is stored in, as a key of `LOGIT_TOLERANCE`."""
    dtypes = {computed, stored or computed, *(parameter.dtype for parameter in model.parameters())}
    return torch.float32 if dtypes == {torch.float32} else torch.bfloat16
