"""Makes a model's forward return the summed loss, or each label's log-probability, computed in chunks of label tokens without
holding all logits.

Replaces: the forward of a model in which `inside_forward` computes, and that of its head while the loss is computed.
Why: under FSDP the head's weights are gathered only inside the forward of the root, so the loss is computed there. transformers
makes all logits, of prompts and padding too, and divides by a micro-batch's tokens (transformers#47688).
Until: transformers sums a loss over given positions by chunks (5.24 does not).

Shapes: `B` rows, `T` positions (those of the decoder), `D` hidden size, `V` vocabulary, `N` label tokens, `n` label tokens of
one chunk.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from toolkit.loss import chunked_cross_entropy, chunked_log_probabilities

MAX_LOGITS_AT_ONCE = 2**26
"""Most elements of one chunk's logits on a CPU: 256 MiB in fp32, or 512 tokens of a vocabulary of 128k."""
FEWEST_LOGITS_AT_ONCE = 2**24
"""On a GPU below 8 GiB: smaller products would not fill it."""
CHUNK_SHARE = 0.01
"""Most of a GPU's memory that one chunk's logits take in fp32. Loss and backward hold about three times that."""
NO_CHUNKS = ("encoder-decoder", "fsmt", "prophetnet")
"""Model types whose decoder itself makes the logits, or whose head reads several streams."""

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def max_logits_at_once(gpu_bytes: int) -> int:
    """Most elements of one chunk's logits on a GPU of this memory: the largest power of two within `CHUNK_SHARE` of it.

    GPUs of one kind report slightly different memory; by powers of two their chunks are equal.
    """
    return max(FEWEST_LOGITS_AT_ONCE, 2 ** int(math.log2(gpu_bytes * CHUNK_SHARE / torch.float32.itemsize)))


def summed_loss(model: nn.Module, batch: dict[str, Any], label_smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """`loss.summed_cross_entropy` of the model's logits, and the number of labels with top logits, two scalars. The second is 0
    while gradients are recorded, because training does not read it. `batch` is a collator's, on the device. Collective under
    FSDP."""
    over_chunks = functools.partial(chunked_cross_entropy, label_smoothing=label_smoothing)
    return inside_forward(model, functools.partial(_of_labels, over_chunks=over_chunks), batch)


def label_log_probabilities(model: nn.Module, batch: dict[str, Any], of_encoding: int = 1) -> torch.Tensor:
    """log p of each label that counts, (N,) fp32 in the order of `labels`. Arguments as in `summed_loss`; of an encoder-decoder
    so many neighbours among the decoder's rows share an encoding. Collective under FSDP."""
    of_labels = functools.partial(_of_labels, over_chunks=chunked_log_probabilities)
    compute = of_labels if of_encoding == 1 else functools.partial(_with_shared_encodings, of_encoding, of_labels)
    return inside_forward(model, compute, batch)


def inside_forward(model: nn.Module, compute: Callable[..., Any], batch: dict[str, Any]) -> Any:
    """What `compute`, (an `Inside`, the batch by names) → tensors, returns within the forward of the root of `model`, as it is
    wrapped. Collective under FSDP.

    FSDP gathers the parameters of the root, and the head's, only there; DDP notes there which gradients it waits for. So whatever
    takes part of a model by itself, as the loss takes the head, is computed there.
    """
    # FSDP casts floats that its root gets to the compute dtype, and so would a label that is a number.
    floats = {name: value for name, value in batch.items() if torch.is_tensor(value) and value.is_floating_point()}
    others = {name: value for name, value in batch.items() if name not in floats}
    return model(**others, inside=functools.partial(compute, **floats), use_cache=False)


@dataclass
class Inside:
    """A model within the forward of the root."""

    model: PreTrainedModel
    forward: Callable[..., Any]
    """transformers' own."""
    heads: dict[str, nn.Module]
    """As `find_head` found them before they were wrapped."""
    takes_all: bool
    """As `holds_all_logits` found it before."""
    max_logits: int | None


def install(model: PreTrainedModel, max_logits: int | None = None) -> None:
    """Let `inside_forward` compute within the model's forward, in place; one chunk's logits have at most `max_logits` elements
    (None: `MAX_LOGITS_AT_ONCE`). Any other call is transformers' own forward, as `generate` needs it. Models that are not from
    transformers stay unchanged."""
    if not hasattr(model, "config"):
        return
    forward, heads, takes_all = model.forward, find_head(model), holds_all_logits(model)
    for head in heads.values():
        head.forward = functools.partial(_forward_or_within, head.forward)

    @functools.wraps(forward)  # generate inspects its signature
    def forward_or_inside(*args: Any, inside: Callable[..., Any] | None = None, **inputs: Any) -> Any:
        if inside is None:
            return forward(*args, **inputs)
        return inside(Inside(model, forward, heads, takes_all, max_logits), **inputs)

    if has_own_forward(model):  # it may hand down unnamed what `generate` makes only for a name, as positions; it gets all logits
        theirs: Any = next(cls for cls in type(model).__mro__ if _is_theirs(vars(cls).get("forward")))
        named = inspect.signature(functools.partial(theirs.forward, model)).parameters.values()
        all_but = [argument for argument in named if argument.name != "logits_to_keep"]
        setattr(forward_or_inside, "__signature__", inspect.Signature(all_but))  # noqa: B010  # no field that mypy knows
    model.forward = forward_or_inside


def holds_all_logits(model: Any) -> bool:
    """Whether the loss is computed from all logits of a micro-batch: see `NO_CHUNKS`. True of a model that is not from
    transformers, of one with a forward of the user's, of one whose head predicts no tokens, of one whose backbone is not where
    its class says (Llama 4 of text alone), and of one whose forward reads more than hidden states."""
    is_listed = not hasattr(model, "config") or model.config.model_type in NO_CHUNKS
    is_listed = is_listed or not any(hasattr(model, name) for name in (model.base_model_prefix, "encoder"))
    return is_listed or has_own_forward(model) or model.get_output_embeddings() is None or not _makes_logits(model)


@torch.no_grad()
def _makes_logits(model: PreTrainedModel) -> bool:
    """Whether the model's forward runs around hidden states alone: tried on two of them, without its weights. The model may be on
    the meta device, or sharded."""
    heads = _own_heads(model)
    widths = [getattr(head, "weight", torch.empty(0)).shape for head in heads.values()]
    if not widths or len(widths[0]) != 2:  # a head inside another module
        return True
    without_weights = {"forward": lambda states_BTD: states_BTD.new_zeros(*states_BTD.shape[:-1], widths[0][0])}
    stand_ins = {name: _StandIn(head, without_weights) for name, head in heads.items()}
    try:
        _logits(model, stand_ins, torch.zeros(2, widths[0][1]))
    except (AttributeError, TypeError):
        return False
    except RuntimeError:  # a part on another device
        pass
    return True


def text_part(model: PreTrainedModel) -> str:
    """The name of the module that texts pass, in a model that has other parts too, as for images; else empty."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is model.config:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def has_own_forward(model: Any) -> bool:
    """Whether the model's class has a forward of the user's, which may make its logits of more than one position's hidden state,
    or change what goes into the backbone. Code of the hub counts as transformers'."""
    return not _is_theirs(type(model).forward)


def _is_theirs(forward: Callable[..., Any] | None) -> bool:
    return str(getattr(forward, "__module__", "")).startswith("transformers")


def called_once(model: Any) -> list[nn.Module]:
    """The modules that the loss calls once, whatever the number of chunks: the backbone, or T5's two stacks."""
    if holds_all_logits(model):
        return [model]
    backbone = _backbone(model)
    return [model.encoder, model.decoder] if backbone is None else [backbone]


def find_head(model: Any) -> dict[str, nn.Module]:
    """The output head by its name, if the loss calls it once too: all chunks are computed within one call, so it may be a shard
    unit. Empty where the chunks call a module around it (BERT's), or the loss takes all logits."""
    return {} if holds_all_logits(model) else _own_heads(model)


def _own_heads(model: Any) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {name: child for name, child in model.named_children() if child is head}


def _of_labels(
    within: Inside, label_positions: torch.Tensor, labels: torch.Tensor, over_chunks: Callable[..., Any], **inputs: Any
) -> Any:
    """What `over_chunks` returns of the hidden states that predict labels.

    Args:
        label_positions: (N,) int64, indices into the flattened (B, T), or (B,) where a row has one label.
        labels: int64, (N,).
        over_chunks: `chunked_cross_entropy`, or another function of its first five arguments.
        inputs: the forward's arguments; tensors of shape (B, T), and (B, S) for an encoder.
    """
    model, heads, max_logits = within.model, within.heads, within.max_logits or MAX_LOGITS_AT_ONCE
    if within.takes_all:
        states_BTX, logits = within.forward(**inputs).logits, lambda logits_nV: logits_nV
    else:
        own = {name: _StandIn(head) for name, head in heads.items()}
        states_BTX, logits = _hidden_states(model, **inputs), functools.partial(_logits, model, own)
    # The collator computes the positions: indexing by a mask would be a host sync.
    states_NX = states_BTX.flatten(0, -2).index_select(0, label_positions)
    vocab_size = model.config.get_text_config().vocab_size

    def of_states(states_NX: torch.Tensor) -> Any:
        return over_chunks(states_NX, labels, logits, vocab_size, max_logits)

    # FSDP gathers a head at its call, and frees it when the gradient of all states is there: one call for all chunks.
    return getattr(model, next(iter(heads)))(states_NX, within=of_states) if heads else of_states(states_NX)


def _with_shared_encodings(of_encoding: int, compute: Callable[..., Any], within: Inside, **inputs: Any) -> Any:
    """What `compute` returns while the decoder takes each row of the encoder's output, and of its mask, so many times."""
    decoder: Any = within.model.get_decoder()

    def repeat(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | given
        of_encoder = [name for name, value in named.items() if name.startswith("encoder_") and torch.is_tensor(value)]
        return (), named | {name: named[name].repeat_interleave(of_encoding, dim=0) for name in of_encoder}

    with decoder.register_forward_pre_hook(repeat, with_kwargs=True):
        return compute(within, **inputs)


def _forward_or_within(forward: Callable[..., Any], *args: Any, within: Callable[..., Any] | None = None, **inputs: Any) -> Any:
    return (within or forward)(*args, **inputs)


def _backbone(model: PreTrainedModel) -> nn.Module | None:
    """The module of everything before the head. T5 and its kin have none, but an encoder and a decoder."""
    return getattr(model, model.base_model_prefix, None)


def _hidden_states(model: Any, **inputs: Any) -> torch.Tensor:
    """Hidden states BTD of the last layer, as the model's own forward makes them."""
    if (backbone := _backbone(model)) is not None:
        return backbone(**inputs).last_hidden_state
    padding_mask_BS = inputs.pop("attention_mask", None)
    encoded_BSD = model.encoder(input_ids=inputs.pop("input_ids"), attention_mask=padding_mask_BS)[0]
    decoder_inputs = {"input_ids": inputs.pop("decoder_input_ids"), "encoder_hidden_states": encoded_BSD, **inputs}
    return model.decoder(encoder_attention_mask=padding_mask_BS, **decoder_inputs)[0]


def _logits(model: PreTrainedModel, heads: Mapping[str, _StandIn], hidden_nD: torch.Tensor) -> torch.Tensor:
    """The model's own logits (n, V) for hidden states (n, D): its class's forward around stacks that return these.

    Models scale, shift or cap their logits differently (Gemma 2 by tanh, Cohere and T5 by a factor, BART by a bias), so their
    own code must run.
    """
    stacks = ("encoder", "decoder") if _backbone(model) is None else (model.base_model_prefix,)
    stand_ins: dict[str, Any] = {name: _Outputs(hidden_nD[None], getattr(model, name)) for name in stacks}
    forward = type(model).forward
    # Gemma 4's reads the shape of its input.
    name = "inputs_embeds" if "inputs_embeds" in inspect.signature(forward).parameters else "input_ids"
    states: Any = {name: hidden_nD[None] if name == "inputs_embeds" else None}
    return forward(_StandIn(model, {**stand_ins, **heads}), **states, use_cache=False).logits[0]


class _StandIn:
    """Stands in for a module: some of its attributes are replaced, and it is called without its hooks."""

    def __init__(self, module: nn.Module, replaced: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class _Outputs:
    """Stands in for a stack and for its outputs, of whatever class: hidden states and numbers of the stack, but nothing else that
    a forward passes on."""

    def __init__(self, hidden_BTD: torch.Tensor, stack: Any) -> None:
        self.last_hidden_state, self._stack = hidden_BTD, stack

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]

    def __call__(self, *args: Any, **inputs: Any) -> _Outputs:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "decoder":  # OPT's forward calls the stack inside its backbone
            return self
        value = getattr(self._stack, name, None)  # Falcon-H1's scales logits by a number of its backbone
        return value if type(value) in (int, float) else None
