"""Checks rows against a model's position limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.config.schema import EvalConfig
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def num_positions(model_config: PretrainedConfig) -> tuple[int | None, int | None]:
    """Tokens that fit an encoder-decoder's encoder and decoder, or a causal model (twice); None: no limit."""
    if not model_config.is_encoder_decoder:
        model_config = model_config.get_text_config()
    both = getattr(model_config, "max_position_embeddings", None)
    sides = ("max_encoder_position_embeddings", "max_decoder_position_embeddings")
    return tuple(getattr(model_config, name, both) for name in sides)  # type: ignore[return-value]


def check_positions(model_config: PretrainedConfig, name: str, longest: dict[str, int], evaluation: EvalConfig) -> None:
    """Refuse rows or generated texts that exceed the model's positions, by a `UserError` with both lengths and the setting to
    lower; T5 and its relatives have no limit. `longest` has the number of tokens of an encoder-decoder's longest `source` and
    `target`, or of a causal model's longest `row` and `prompt`, with which a generated text shares its positions."""
    encoder, decoder = num_positions(model_config)
    new = evaluation.max_new_tokens if evaluation.generate else 0
    if "source" in longest:
        _check_fits(name, "the longest source has", longest["source"], encoder, "data.max_source_length_tokens")
        _check_fits(name, "the longest target has", longest["target"], decoder, "data.max_target_length_tokens")
        _check_fits(name, "a generated text may have", new, decoder, "eval.max_new_tokens")
        return
    _check_fits(name, "the longest row has", longest["row"], decoder, "data.max_length_tokens")
    if prompt := longest.get("prompt"):
        what = f"a prompt has up to {prompt} tokens and eval.max_new_tokens is {new}, together"
        _check_fits(name, what, prompt + new, decoder, "data.max_length_tokens plus eval.max_new_tokens")


def list_shared_ropes(model_config: PretrainedConfig) -> list[tuple[str, int]]:
    """The types of rope whose frequencies follow the longest row of a forward, each with the tokens from which on they change.

    See `dynamic_rope_update` in modeling_rope_utils.py of transformers.
    """
    config = model_config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    return [
        (one["rope_type"], one.get("original_max_position_embeddings") or config.max_position_embeddings)
        for one in of_layers
        if one.get("rope_type") in ("longrope", "dynamic")
    ]


def group_by_rope(ropes: Sequence[tuple[str, int]], start: int, end: int) -> tuple[int, ...]:
    """Rows of one group have the same frequencies together as each alone, from a forward of `start` tokens to one of `end`: all
    below the limit, or (`longrope`, which has two sets of frequencies) above it; else rows of equal length."""
    return tuple(0 if end <= limit else -1 if kind == "longrope" and start > limit else start for kind, limit in ropes)


def warn_of_shared_rope(model_config: PretrainedConfig, longest_row_tokens: int) -> str | None:
    """The warning that a row's rotary positions depend on the rows beside it; None if they do not."""
    for kind, limit in list_shared_ropes(model_config):
        if longest_row_tokens > limit:
            what = f"beyond {limit} the model's {kind} rope has other frequencies for all rows of a micro-batch or pack"
            remedy = f"so training losses depend on which rows lie together; data.max_length_tokens {limit} avoids that"
            return f"the longest row has {longest_row_tokens} tokens: {what}, {remedy}"
    return None


def _check_fits(name: str, what: str, length: int, limit: int | None, setting: str) -> None:
    if limit is not None and length > limit:
        raise UserError(f"{what} {length} tokens, but {name} has only {limit} positions: set {setting} to at most {limit}")
