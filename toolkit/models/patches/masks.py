"""Attention masks that are made without reading the device, for which the host would wait in every micro-batch.

Replaces: what `transformers.masking_utils` asks of tensors' values, and calls of its mask functions without positions.
Why: transformers leaves out a mask that masks nothing, and looks for packed rows; for both it reads tensors back. The collators
know both: they hand over positions only where rows are packed, and a mask only where a row is padded. They also know where the
documents of a packed row lie, which attention by document (`documents.py`) takes in place of a mask, and flash attention in place
of a search in every block.

Until: transformers' masks read nothing and take the documents of a packed row (5.24 reads).

Shapes: `B` rows, `T` positions, `N` documents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toolkit.config.schema import RecipeConfig
from toolkit.errors import UserError
from toolkit.models.patches import recurrent
from toolkit.models.patches.chunked_loss import text_part
from toolkit.models.patches.documents import BY_DOCUMENT, Documents
from toolkit.models.patches.experts import experts_by_token
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

RECURRENT = "create_recurrent_attention_mask"
"""What forwards of families with recurrent layers call, for padding."""

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)


def install(model: PreTrainedModel) -> None:
    """Make `model(…)` on a collator's batch build its masks from what the batch holds, in place.

    `document_lengths` and `document_starts` of a batch go no further where the model's attention has no use for them. Calls with
    a mask for causal attention or with the encoder's outputs, as `generate` makes them, stay as they are. So do models that are
    not from transformers.
    """
    if not hasattr(model, "config"):
        return
    forward = model.forward
    of_generate = ("encoder_outputs", "decoder_attention_mask") if model.config.is_encoder_decoder else ("attention_mask",)
    arguments = inspect.signature(model.base_model.forward).parameters.values()
    hands_down = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments)
    takes_positions = hands_down or any(argument.name == "position_ids" for argument in arguments)
    names, current, has_axes = _names_of_forward(model), recurrent.install(model), _has_axes(model)
    tables: list[Any] = [each for each in model.modules() if hasattr(each, "create_position_ids_from_inputs_embeds")]
    first = tables[0].padding_idx + 1 if tables else 0  # as fairseq counts positions (Kosmos 2.5)
    is_flash = hands_down and "flash" in (private("_attn_implementation", model.config) or "")

    @functools.wraps(forward)  # generate inspects its signature
    def forward_with_known_masks(
        *args: Any, document_lengths: list[int] | None = None, document_starts: torch.Tensor | None = None, **inputs: Any
    ) -> Any:
        current.documents = documents = None
        if any(inputs.get(name) is not None for name in of_generate):
            return forward(*args, **inputs)
        if document_lengths is not None and document_starts is not None:
            current.documents = documents = Documents(tuple(document_lengths), document_starts)
            if is_flash:  # transformers' `FlashAttentionKwargs`, which models hand down to flash attention
                inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), documents.starts_N1)
                inputs |= dict.fromkeys(("max_length_q", "max_length_k"), max(documents.lengths))
        position_ids = inputs.get("position_ids") if takes_positions else inputs.pop("position_ids", None)
        if takes_positions and position_ids is not None and (has_axes or first):
            inputs["position_ids"] = position_ids.expand(4, -1, -1) if has_axes else position_ids + first
        with known_masks(is_packed=position_ids is not None, documents=documents), _positions_given(names, position_ids):
            return forward(*args, **inputs)

    model.forward = forward_with_known_masks
    silence_padding(model)


def choose_packing(config: ConfigT, model: PreTrainedModel, *, is_one_graph: bool = False) -> ConfigT:
    """`config` with `data.packing` true or false, and a line where `auto` is false. If packing is asked for, and the model
    cannot keep packed rows apart, that is a `UserError`. With `is_one_graph`, nothing in a block may run uncompiled.

    transformers tells packed rows apart by their positions (`masking_utils.py`); some models hand their masks none. Recurrent
    layers start afresh at each row (`recurrent.py`). Where a forward of the model, on the meta device, fails, the check of the
    real one decides.
    """
    if not config.packs:
        return config
    name, signature = type(model).__name__, str(inspect.signature(model.base_model.forward))
    is_recurrent = bool(recurrent.find_layers(model))
    packing = is_recurrent or "position_ids" in signature or "**" in signature
    is_flash = "flash" in (private("_attn_implementation", model.config) or "")
    called = {name for stack in _stacks(model) for name in _globals(stack) if re.fullmatch("create_\\w+_mask", name)}
    if (RECURRENT in called and not is_recurrent) or (is_recurrent and is_one_graph):
        packing = False
    if any(name.endswith(".compressor") for name, _ in model.named_modules()):  # DeepSeek V4's blocks of tokens go across texts
        packing = False
    has_attention = bool(called - {RECURRENT}) or not is_recurrent
    if packing and has_attention and not is_flash:  # flash attention gets the documents' lengths
        silence_padding(model)
        tokens_BT = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        given = _positions_given(_names_of_forward(model), tokens_BT)
        with known_masks(is_packed=True, documents=None) as asked, given, contextlib.suppress(Exception), experts_by_token(model):
            positions = tokens_BT.expand(4, -1, -1) if _has_axes(model) else tokens_BT
            model.base_model(input_ids=tokens_BT, position_ids=positions, use_cache=False)
            packing = bool(asked)
    why = "lets packed rows see each other" + (" under dynamo_use_fullgraph" if is_recurrent and is_one_graph else "")
    if not packing and config.data.packing is True:
        raise UserError(f"data.packing is true, but {name} {why}: set data.packing to auto or false")
    if not packing:
        logger.info(f"rows are not packed (data.packing auto): {name} {why.replace('lets', 'would let')}")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether packed rows must form one row of the tensors, for the attention or recurrent layers; see `CausalCollator`."""
    attention = private("_attn_implementation", model.config) or ""
    return attention == BY_DOCUMENT or "flash" in attention or bool(recurrent.find_layers(model))


@contextlib.contextmanager
def known_masks(*, is_packed: bool, documents: Documents | None) -> Iterator[list[torch.Tensor]]:
    """Replace the functions of transformers' masks that read. Yields the positions by which masks were asked to keep packed rows
    apart.

    The masks are those that transformers itself makes for padded or packed rows. A mask function that keeps `documents` apart
    and is otherwise causal, within a window or not, has them as its attribute; `documents.build_mask` looks for it.
    """
    from transformers import masking_utils

    asked: list[torch.Tensor] = []
    causal = private("causal_mask_function")

    def find_packed(position_ids_BT: torch.Tensor) -> torch.Tensor | None:
        """Number of each token's packed row, BT; None where no row is packed."""
        asked.append(position_ids_BT)
        before_B1 = position_ids_BT[:, :1] - 1
        return (torch.diff(position_ids_BT, prepend=before_B1) != 1).cumsum(-1) if is_packed else None

    def can_ignore_bidirectional(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    def can_ignore_causal(padding_mask: Any, *sizes: Any, **more: Any) -> bool:
        """No token sees the padding, which comes last. BART's decoder makes a mask of ones where it gets none."""
        return bool(kept["_ignore_causal_mask_sdpa"](None, *sizes, **more))

    def slide_within(window: int) -> Any:
        mask_function = kept["sliding_window_causal_mask_function"](window)
        mask_function.window = window
        return mask_function

    def remap_positions(mask_function: Any, position_ids_BT: torch.Tensor) -> Any:
        remapped = kept["remap_positions_for_packed_sequence"](mask_function, position_ids_BT)
        window = getattr(mask_function, "window", None)
        if documents is not None and (window is not None or mask_function is causal):
            remapped.within = dataclasses.replace(documents, window=window)
        return remapped

    def keep_documents_apart(*mask_functions: Any) -> Any:
        """A remapped function meets the one that keeps rows apart: before it in transformers 5.24, after it in 5.23."""
        both = kept["and_masks"](*mask_functions)
        for function in mask_functions:
            if hasattr(function, "within"):
                both.documents = function.within
        return both

    known: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": find_packed,
        "_ignore_bidirectional_mask_sdpa": can_ignore_bidirectional,
        "_ignore_causal_mask_sdpa": can_ignore_causal,
        "sliding_window_causal_mask_function": slide_within,
        "remap_positions_for_packed_sequence": remap_positions,
        "and_masks": keep_documents_apart,
    }
    kept = {name: private(name) for name in known}
    for name, function in known.items():
        setattr(masking_utils, name, function)
    try:
        yield asked
    finally:
        for name, function in kept.items():
            setattr(masking_utils, name, function)


def _names_of_forward(model: PreTrainedModel) -> dict[str, Any]:
    """The global names of the code of a model's forward; empty where masks alone do not keep packed rows apart: positions are
    neither rotary, nor given, nor those of ALiBi (of which attention sees differences only), nor left to recurrent layers."""
    base, names = model.base_model, _globals(model.base_model)
    is_apart = hasattr(base, "rotary_emb") or "position_ids" in inspect.signature(base.forward).parameters
    is_apart = is_apart or any("alibi" in name for name in names) or bool(recurrent.find_layers(model))
    return names if is_apart else {}


def _stacks(model: PreTrainedModel) -> tuple[Any, Any]:
    """The backbone, and in a model of images the part of it that texts pass."""
    return model.base_model, model.get_submodule(text_part(model))


def _has_axes(model: PreTrainedModel) -> bool:
    """Whether a position is four numbers (Qwen-VL, GLM-V): the first keeps packed rows apart, which transformers does not do by
    positions BT; time, height and width are the same in texts."""
    return "text_position_ids" in inspect.unwrap(type(_stacks(model)[1]).forward).__code__.co_varnames


def _globals(stack: Any) -> dict[str, Any]:
    found: dict[str, Any] = inspect.unwrap(type(stack).forward).__globals__
    return found


@contextlib.contextmanager
def _positions_given(names: dict[str, Any], position_ids: torch.Tensor | None) -> Iterator[None]:
    """Give positions to transformers' mask functions where a forward calls them without (gpt-oss, AFMoE)."""
    own: dict[str, Any] = {
        name: names[name] for name in ("create_causal_mask", "create_sliding_window_causal_mask") if name in names
    }
    names.update({name: functools.partial(function, position_ids=position_ids) for name, function in own.items()})
    try:
        yield
    finally:
        names.update(own)


def silence_padding(model: PreTrainedModel) -> None:
    """GPT-2 and BERT look for padding ids where they get no mask, to warn. Here padding comes last."""
    name = "warn_if_padding_and_no_attention_mask"
    private(name)
    for module in model.modules():
        if hasattr(module, name):  # modules of transformers that are models themselves
            setattr(module, name, lambda *_: None)
