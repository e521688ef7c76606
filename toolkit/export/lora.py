"""Exports an adapter for plain peft, and the merged model for plain transformers.

Each is reloaded with the library that will read it, and compared, before it counts as exported.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from toolkit.export.compare import compare_logits, compare_weights, reload
from toolkit.models.lora_files import BASE_FILE, WEIGHTS_FILE, base_name, file_names
from toolkit.parallel.gather import assign_parameters
from toolkit.parallel.wrap import copy_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


def write_adapter(folder: Path, skeleton: PreTrainedModel, weights: Tensors, base_hashes: dict[str, str]) -> None:
    """Write the trained tensors as peft does, and `base.json`.

    Args:
        skeleton: the model with the adapter; its weights are not read.
        weights: unsharded trainable parameters by name, fp32 on the CPU.
        base_hashes: from `lora_files.hash_base`.
    """
    lora: Any = copy.deepcopy(_lora_config(skeleton))
    lora.inference_mode = True
    # On loading, peft ties only modules that `modules_to_save` names.
    lora.modules_to_save = sorted({*(lora.modules_to_save or ()), *(getattr(lora, "modules_to_tie", None) or ())}) or None
    if not isinstance(lora.target_modules, str):
        lora.target_modules = sorted(lora.target_modules)
    lora.save_pretrained(str(folder))
    # Clones, because safetensors refuses tensors that share memory, and peft stores a tied weight under all its names.
    stored = {stored: weights[name].clone().contiguous() for stored, name in file_names(skeleton).items()}
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    base = {"name_or_path": lora.base_model_name_or_path, "revision": lora.revision, "tensors": base_hashes}
    (folder / BASE_FILE).write_text(json.dumps(base, indent=1), encoding="utf-8")


def compare_adapter(folder: Path, skeleton: PreTrainedModel, weights: Tensors, check: Tensors, computed: torch.dtype) -> None:
    """Load the base from its origin and the adapter with plain peft, in fp32, and compare them with the trained model.

    Args:
        check: a forward's arguments, and the trained model's `logits` for them.
        computed: dtype of the trained model's forward.

    Raises:
        RuntimeError: weights differ, or logits differ although the model computed, and its base is stored, in fp32.
    """
    from peft import PeftModel

    lora = _lora_config(skeleton)
    base = reload(skeleton, lora.base_model_name_or_path, revision=lora.revision or "main")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated"
        )  # peft 0.21 asks transformers for it
        reloaded = PeftModel.from_pretrained(base, str(folder)).eval()
    compare_weights({f"base_model.model.{name}": weight for name, weight in weights.items()}, reloaded, folder)
    why = f"the adapter is bit for bit the trained one, whose model computed in {computed}"
    compare_logits(check, reloaded, folder, _coarsest(skeleton, computed), why)


def merge(skeleton: PreTrainedModel, weights: Tensors) -> PreTrainedModel:
    """The plain model with the adapter merged into its weights: merged by peft in fp32, stored in the base's dtype.

    Only one layer at a time is fp32, so that the merge needs little more memory than the base.

    Args:
        weights: all parameters, unsharded, by name, on the CPU; the frozen ones are modified.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    dtype = min((weight.dtype for name, weight in weights.items() if base_name(name)), key=lambda dtype: dtype.itemsize)
    model: Any = copy_on_meta(skeleton)
    assign_parameters(model, weights)
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            layer: Any = module.get_base_layer()
            layer.weight.data = layer.weight.data.float()
            module.merge()
            layer.weight.data = layer.weight.data.to(dtype)
            model.set_submodule(name, layer)
        elif isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save["default"])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    del model.peft_config
    return model


def compare_merged(folder: Path, merged: PreTrainedModel, check: Tensors, computed: torch.dtype) -> None:
    """Load the merged model with plain transformers in fp32, and compare its weights and the trained model's logits.

    Raises:
        RuntimeError: weights differ, or logits differ although the model computed, and is stored, in fp32.
    """
    reloaded = reload(merged, folder)
    weights = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    compare_weights(weights, reloaded, folder)
    why = f"merging rounded the weights to {merged.dtype}, and the trained model computed in {computed}"
    compare_logits(check, reloaded, folder, _coarsest(merged, computed), why)


def _lora_config(skeleton: PreTrainedModel) -> Any:
    return skeleton.peft_config["default"]  # type: ignore[index]


def _coarsest(model: PreTrainedModel, computed: torch.dtype) -> torch.dtype:
    dtypes = {computed, *(parameter.dtype for parameter in model.parameters())}
    return torch.float32 if dtypes == {torch.float32} else torch.bfloat16
