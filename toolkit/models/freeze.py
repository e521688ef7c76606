"""Names of tied parameters; frozen parameters: which ones, their storage dtype, and their hashes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from toolkit.config.schema import RecipeConfig, TrainedDtype
from toolkit.errors import UserError, first_line, first_of
from toolkit.models.patches.chunked_loss import has_own_forward
from toolkit.models.patches.experts import experts_by_token
from toolkit.models.quantized import QuantizedWeight
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)
FEW_TOKENS, MANY_TOKENS = 8, 256
"""The second is enough for the compressed blocks of sparse attention, of up to 128 tokens."""


def aliases(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, several if it is tied, by the parameter's `id`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze every parameter that has a name (tied aliases included) fully matched by a pattern. Errors are those of
    `find_frozen`; nothing left to train is a `UserError` too."""
    for name in find_frozen(model, patterns):
        model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model.freeze {patterns} freezes every parameter: leave something to train")


def freeze_unreached(skeleton: PreTrainedModel, config: ConfigT) -> ConfigT:
    """`config` with what the logits' loss does not reach in `model.freeze`, and where an adapter would not be called, and a line
    that names each. A forward of the user's, or a head that predicts no tokens, may be for a loss that reaches more."""
    if config.adapter.modules_to_save or has_own_forward(skeleton) or not skeleton.can_generate():
        return config
    names, uncalled = find_unreached(skeleton), find_uncalled(skeleton) if config.adapter.method != "none" else []
    uncalled = [name for name in uncalled if name not in names]
    if names:
        logger.info(f"the loss of texts does not reach {shorten(names)}: frozen, and without an adapter")
    if uncalled:
        logger.info(f"the model's code reads {shorten(uncalled)} without a call of the layer, or by groups: without an adapter")
    freezes = [*config.model.freeze, *map(re.escape, names + uncalled)]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=freezes))


def shorten(names: Iterable[str]) -> str:
    """The first eight of names in which `*` stands for numbers, each with how many it stands for."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return first_of(f"{pattern} ({len(same)})" if len(same) > 1 else same[0] for pattern, same in alike.items())


def find_unreached(model: PreTrainedModel) -> list[str]:
    """The parameters that a text's loss never reaches by the code of the model: indexers of sparse attention, LED's global
    attention, towers for images. Found by a forward and a backward on the meta device; empty where these fail. A model of images
    that continues no text without them is a `UserError`. The model is on the meta device, without an adapter, nothing frozen."""
    # What the model's own code freezes may be linear layers, as of BLT's patcher, for which `all-linear` would have adapters.
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    own = [f"{name}.weight" for name in linear if not model.get_submodule(name).weight.requires_grad]
    found = _unreached_by(model, FEW_TOKENS)  # few are fast where a layer computes token after token
    return own + ([name for name in _unreached_by(model, MANY_TOKENS) if name in found] if found else [])


def find_uncalled(model: PreTrainedModel) -> list[str]:
    """The weights of linear layers that an adapter cannot be beside: other code reads their weight without a call (Jamba's
    `dt_proj`; Gemma 3n's `correction_coefs`, in training only), or their product has another shape (DeepSeek V4's, by groups).
    Found as by `find_unreached`, in both modes; and by the code, which hands some to a kernel where that is installed (Mamba's
    `out_proj`).
    """

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not inputs or output.shape == (*inputs[0].shape[:-1], module.out_features):
            called.add(module)

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    drops_layers = any(getattr(module, "layerdrop", 0) for module in model.modules())  # at random, in training
    called, uncalled, was_training = set[nn.Module](), set[str](), model.training
    hooks = [module.register_forward_hook(note) for module in linear.values()]
    inputs = meta_inputs(model, FEW_TOKENS)
    for mode in (False,) if drops_layers else (False, True):
        called.clear()
        model.train(mode)
        with contextlib.suppress(Exception), experts_by_token(model), _NothingIsMarked(inputs.values()), torch.no_grad():
            model(**inputs, use_cache=False)
            uncalled |= {f"{name}.weight" for name, module in linear.items() if module not in called}
    for hook in hooks:
        hook.remove()
    model.train(was_training)
    holders = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in linear}
    sources = {holder: _source_of(holder) for holder in set(holders.values())}
    for name, holder in holders.items():
        if re.search(rf"^\s*(\w+=)?self\.{name.rpartition('.')[2]}\.weight,$", sources[holder], re.MULTILINE):
            uncalled.add(f"{name}.weight")
    return sorted(uncalled)


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class of an interactive session, or compiled
        return ""


def _unreached_by(model: PreTrainedModel, num_tokens: int) -> list[str]:
    from transformers import AutoModelForImageTextToText

    found: list[str] = []
    inputs = meta_inputs(model, num_tokens)
    was_training, marks = model.training, _NothingIsMarked(inputs.values())
    model.eval()  # without a layer that is dropped at random
    takes_images = type(model.config) in private("_model_mapping", AutoModelForImageTextToText)
    try:
        if takes_images and "labels" not in inspect.signature(type(model).forward).parameters:
            raise TypeError("its forward takes no labels")
        with experts_by_token(model), marks:
            model(**inputs, use_cache=False).logits.sum().backward()
        found = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    except NotImplementedError:  # what the forward reads is not known without weights
        pass
    except Exception as error:
        if takes_images and not marks.has_guessed:
            what = f"{model.config.name_or_path} is a {model.config.model_type} model, which continues no text without images"
            raise UserError(f"model.name_or_path {what} ({first_line(error)}): take one that does") from None
    finally:
        model.zero_grad()
        model.train(was_training)
    return found


def meta_inputs(model: PreTrainedModel, num_tokens: int) -> dict[str, torch.Tensor]:
    """What a forward on the meta device gets of a text, so many tokens or as many as the model has positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or num_tokens
    tokens_BT = torch.zeros(1, min(limit, num_tokens), dtype=torch.int64, device="meta")
    return {"input_ids": tokens_BT} | ({"decoder_input_ids": tokens_BT} if model.config.is_encoder_decoder else {})


class _NothingIsMarked(TorchFunctionMode):
    """Context in which a flag that is read from the meta device is false, as no token is an image or attends globally, nor one
    of a kind whose row is set apart (T5Gemma 2's end of an image); and, which is a guess, no element is 0."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.tokens, self.marks, self.has_guessed = {id(tokens) for tokens in inputs}, list[torch.Tensor](), False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.item, torch.Tensor.__bool__) and args[0].is_meta and args[0].dtype is torch.bool:
            return False
        if function in (torch.Tensor.eq, torch.Tensor.__eq__) and id(args[0]) in self.tokens:
            self.marks.append(function(*args))
            return self.marks[-1]
        if function is torch.Tensor.__setitem__ and any(args[1] is mark for mark in self.marks):
            return None
        try:
            return function(*args, **(kwargs or {}))
        except NotImplementedError:  # the size depends on what is not 0
            self.has_guessed = True
            with private("patch")(meta_nonzero_assume_all_nonzero=True):
                return function(*args, **(kwargs or {}))


def find_frozen(model: nn.Module, patterns: list[str]) -> set[str]:
    """The names that a pattern fully matches; a `UserError` for one that is not a regular expression or matches nothing."""
    named, found = [name for name, _ in model.named_parameters(remove_duplicate=False)], set[str]()
    for pattern in patterns:
        matched = match_names(named, pattern, "model.freeze")
        if not matched:
            raise UserError(f"model.freeze {pattern!r} matches no parameter; names look like {named[0]}, {named[-1]}")
        found.update(matched)
    return found


def match_names(names: list[str], pattern: str, setting: str) -> list[str]:
    """The names that an expression fully matches; one that is not a regular expression is a `UserError`, with its setting."""
    try:
        return [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UserError(f"{setting} {pattern!r} is not a regular expression ({error})") from None


def freeze_as(model: nn.Module, skeleton: nn.Module) -> None:
    """Freeze what is frozen in the skeleton, by `freeze` or by the model's own code (Pegasus' sinusoidal positions).

    transformers 5.23 loses the latter when it loads weights: every parameter is trainable afterwards.
    """
    frozen = {name for name, parameter in skeleton.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            parameter.requires_grad_(False)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen parameters in `dtype`, but trainable ones and LayerNorms in fp32; codes and scales stay as they are.

    They compute in the dtype that FSDP, or `ComputeCopies`, gives them.
    """
    kept = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    for parameter in model.parameters():
        in_fp32 = parameter.requires_grad or id(parameter) in kept
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype)
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            module.dtype = dtype


def cast_trained(model: nn.Module, setting: TrainedDtype) -> None:
    """Store trainable parameters as `model.trained_dtype` says: in bf16 also LayerNorms, as FSDP2 gathers one dtype a unit."""
    for parameter in model.parameters():
        if parameter.requires_grad and setting == "bfloat16_stochastic":
            parameter.data = parameter.data.to(torch.bfloat16)


class TensorHash:
    """`hash_tensor` of a tensor that is given in parts on the CPU, in memory order."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._dtype, self._sha256 = dtype, hashlib.sha256(f"{dtype} {tuple(shape)}".encode())
        self.hexdigest = self._sha256.hexdigest

    def add(self, part: torch.Tensor) -> None:
        """Add the next part."""
        self._sha256.update(part.to(self._dtype).flatten().contiguous().view(torch.uint8).numpy().data)


def hash_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """sha256 of dtype, shape and bytes of an unsharded tensor, cast to `dtype`."""
    (hashed := TensorHash(tensor.shape, dtype)).add(tensor.detach().cpu())
    return hashed.hexdigest()
