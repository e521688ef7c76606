"""An adapter's folder that plain peft loads, and the model with the adapter merged into it that plain transformers loads.

Each is reloaded by its folder's future reader and compared before it is called exported.
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
        weights: whole trainable parameters by name, fp32 on the CPU.
        base_hashes: as `adapter_files.hash_base` gives them.
    """
    lora: Any = copy.deepcopy(_lora_config(skeleton))
    lora.inference_mode = True
    # peft ties again only what is named among the modules to save.
    lora.modules_to_save = sorted({*(lora.modules_to_save or ()), *(getattr(lora, "modules_to_tie", None) or ())}) or None
    if not isinstance(lora.target_modules, str):
        lora.target_modules = sorted(lora.target_modules)
    lora.save_pretrained(str(folder))
    # A copy each: safetensors takes no two names of one memory, and peft wants a tied weight under all its names.
    stored = {stored: weights[name].clone().contiguous() for stored, name in file_names(skeleton).items()}
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    base = {"name_or_path": lora.base_model_name_or_path, "revision": lora.revision, "tensors": base_hashes}
    (folder / BASE_FILE).write_text(json.dumps(base, indent=1), encoding="utf-8")


def compare_adapter(folder: Path, skeleton: PreTrainedModel, weights: Tensors, check: Tensors, computed: torch.dtype) -> None:
    """Load the adapter by plain peft on the base from where it is, in fp32, and hold both against the trained model.

    Args:
        check: a forward's arguments and the trained model's `logits`.
        computed: dtype of the trained model's forward.

    Raises:
        RuntimeError: weights differ, or logits where the model was computed and its base stored in fp32.
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
    """The plain model with the adapter in its weights: merged by peft in fp32, stored in the base's dtype.

    One layer at a time is fp32, so that it takes hardly more than the base's own memory.

    Args:
        weights: all whole parameters by name, on the CPU; the frozen ones are changed.
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
    """Load the merged model by plain transformers in fp32 and hold it against what was written and trained.

    Raises:
        RuntimeError: weights differ, or logits where the model was computed and is stored in fp32.
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
