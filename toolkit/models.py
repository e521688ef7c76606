"""Hugging Face models: early checks on a weightless skeleton, loading, freezing."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from toolkit.config_sections import EvalConfig, ModelConfig
from toolkit.data.collate import check_label_shift
from toolkit.distributed import print_rank0, rank, seed_all
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DROPOUT_RATES = ("dropout", "dropout_rate", "attention_dropout", "activation_dropout")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LAYER_DROP_RATES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")

AutoClass = Literal["AutoModelForSeq2SeqLM", "AutoModelForCausalLM"]
KINDS: dict[AutoClass, str] = {
    "AutoModelForSeq2SeqLM": "an encoder-decoder that generates text: take one such as T5, BART or Pegasus",
    "AutoModelForCausalLM": "a causal language model: take one such as Llama, Qwen or Gemma",
}
"""transformers' class that finds a model's own, and what it finds."""


def load_model_config(config: ModelConfig, auto_class: AutoClass) -> PretrainedConfig:
    """Read the model's `config.json`, from a folder or the hub, with `model.dropout` put in.

    Raises:
        UserError: no such model, no config, or a model of another kind.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    name = config.name_or_path
    folder = Path(name)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"model.name_or_path {name} is an adapter: give its base there, and this folder as adapter.name_or_path with "
            "adapter.method"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model.name_or_path {name} has no config.json: give a Hugging Face model folder")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise UserError(f"model.name_or_path {name} is not a folder here: give an existing folder or a hub id")
    try:
        model_config = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        if isinstance(error, StrictDataclassError):  # which key is on the first line, what is wrong with it on the second
            reason = "config.json: " + " ".join(str(error).split())
        raise UserError(
            f"model.name_or_path {name} could not be read ({reason}): give a Hugging Face model folder, or a hub id within reach"
        ) from None
    if not config.trust_remote_code and type(model_config) not in getattr(transformers, auto_class)._model_mapping:
        raise UserError(f"model.name_or_path {name} is a {model_config.model_type} model, not {KINDS[auto_class]}")
    if any((getattr(model_config, key, None) or 0) > 1 for key in EXPERT_COUNTS):
        raise UserError(
            f"model.name_or_path {name} is a mixture of experts: its auxiliary loss is a mean over each micro-batch, which "
            "cannot be made exact over the global batch, so it is not supported: take a dense model"
        )
    if config.dropout is not None:
        for rate in DROPOUT_RATES:
            if hasattr(model_config, rate):
                setattr(model_config, rate, config.dropout)
    for rate in LAYER_DROP_RATES:
        if getattr(model_config, rate, None):
            # A layer that one rank draws to leave out is a collective that the others wait for (M2M100 has a rate of 0.05).
            setattr(model_config, rate, 0.0)
            print_rank0(f"{rate} of {name} is set to 0: every rank must run every layer")
    return model_config


def build_skeleton(config: ModelConfig, model_config: PretrainedConfig, auto_class: AutoClass) -> PreTrainedModel:
    """The model without weights (meta device): names, shapes and classes for checks that should not wait for a download.

    Raises:
        UserError: the attention implementation does not exist for this model, or labels are shifted in a way of its own.
    """
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(
                model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **_attention(config)
            )
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        if config.attn_implementation:
            first_sentence = reason.split(". ")[0]
            raise UserError(
                f"model.attn_implementation {config.attn_implementation} cannot be used with {config.name_or_path} "
                f"({first_sentence}): take sdpa or eager, or leave it out"
            ) from None
        raise UserError(f"model {config.name_or_path} cannot be built from its config.json: {reason}") from None
    if auto_class == "AutoModelForSeq2SeqLM":
        check_label_shift(model, *special_tokens(model_config, config.name_or_path))
    return model


def load_model(
    config: ModelConfig, model_config: PretrainedConfig, auto_class: AutoClass, seed: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model on the CPU in `dtype`, with random weights (`from_scratch`, drawn from `seed`) or its pretrained ones.

    Raises:
        UserError: there are no safetensors weights, or not all of them.
    """
    import transformers
    from transformers.utils import logging

    if rank() != 0 or not sys.stderr.isatty():  # bars are for terminals
        logging.disable_progress_bar()
    if config.from_scratch:
        seed_all("weights", seed)
        model = getattr(transformers, auto_class).from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, **_attention(config)
        )
    else:
        try:
            model, report = getattr(transformers, auto_class).from_pretrained(
                config.name_or_path,
                output_loading_info=True,
                config=model_config,
                revision=config.revision,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                **_attention(config),
            )
        except OSError as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"model {config.name_or_path} has no loadable safetensors weights ({first_line}): "
                "give a folder with them, or model.from_scratch true for random ones"
            ) from None
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"the weights of model.name_or_path {config.name_or_path} lack {len(missing)} of the model's parameters "
                f"({', '.join(missing[:3])}, …), which would stay random: give whole weights, or model.from_scratch true"
            )
    return model


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze every parameter one of whose names (tied aliases included) is matched whole by a pattern.

    Raises:
        UserError: a pattern that is no regular expression or matches nothing, or nothing left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            matched = [parameter for name, parameter in named if re.fullmatch(pattern, name)]
        except re.error as error:
            raise UserError(f"model.freeze {pattern!r} is not a regular expression ({error})") from None
        if not matched:
            raise UserError(f"model.freeze {pattern!r} matches no parameter; names look like {named[0][0]}, {named[-1][0]}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for _, p in named):
        raise UserError(f"model.freeze {patterns} freezes every parameter: leave something to train")


def freeze_as(model: nn.Module, skeleton: nn.Module) -> None:
    """Freeze what is frozen in the skeleton: by `freeze`, or by the model's own code (Pegasus' sinusoidal positions).

    transformers 5.23 forgets the latter when it loads weights: every parameter comes back trainable.
    """
    frozen = {name for name, parameter in skeleton.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            parameter.requires_grad_(False)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen parameters in `dtype`, and those that train in fp32; LayerNorms too.

    Under autocast a LayerNorm gets fp32 hidden states behind an fp32 embedding, and on a CPU it takes no two dtypes.
    """
    kept = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    for parameter in model.parameters():
        in_fp32 = parameter.requires_grad or id(parameter) in kept
        parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype)


def hash_frozen(model: nn.Module) -> dict[str, str]:
    """`hash_parameters` of the frozen ones.

    Checkpoints leave frozen weights out and record this instead, so that a resume can tell another base.
    """
    return hash_parameters(model, {name for name, parameter in model.named_parameters() if not parameter.requires_grad})


def hash_parameters(model: nn.Module, names: set[str]) -> dict[str, str]:
    """sha256 of dtype, shape and bytes of an unsharded model's parameters, by name."""
    hashes = {}
    for name, parameter in sorted(model.named_parameters()):
        if name in names:
            digest = hashlib.sha256(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
            hashes[name] = digest.hexdigest()
    return hashes


def num_token_embeddings(model: PreTrainedModel) -> int:
    """Rows of the input embedding: the largest vocabulary that the model takes."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def check_positions(model_config: PretrainedConfig, name: str, longest: dict[str, int], evaluation: EvalConfig) -> None:
    """Refuse rows, or generated texts, longer than an encoder-decoder has positions; T5 and its like have no limit.

    Args:
        longest: tokens of the longest `source` and `target`.

    Raises:
        UserError: naming both lengths and the setting to lower.
    """
    both = getattr(model_config, "max_position_embeddings", None)
    encoder = getattr(model_config, "max_encoder_position_embeddings", both)
    decoder = getattr(model_config, "max_decoder_position_embeddings", both)
    new = evaluation.max_new_tokens if evaluation.generate else 0
    _check_fits(name, "the longest source has", longest["source"], encoder, "data.max_source_length_tokens")
    _check_fits(name, "the longest target has", longest["target"], decoder, "data.max_target_length_tokens")
    _check_fits(name, "a generated text may have", new, decoder, "eval.max_new_tokens")


def check_causal_positions(model_config: PretrainedConfig, name: str, longest: dict[str, int], evaluation: EvalConfig) -> None:
    """Refuse rows, or prompts with what is generated, longer than a causal model has positions.

    Args:
        longest: tokens of the longest `row` and `prompt`.

    Raises:
        UserError: naming both lengths and the setting to lower.
    """
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    new = evaluation.max_new_tokens if evaluation.generate and longest["prompt"] else 0
    _check_fits(name, "the longest row has", longest["row"], limit, "data.max_length_tokens")
    what = f"a prompt has up to {longest['prompt']} tokens and eval.max_new_tokens is {new}, together"
    _check_fits(name, what, longest["prompt"] + new, limit, "data.max_length_tokens plus eval.max_new_tokens")


def _check_fits(name: str, what: str, length: int, limit: int | None, setting: str) -> None:
    if limit is not None and length > limit:
        raise UserError(f"{what} {length} tokens, but {name} has only {limit} positions: set {setting} to at most {limit}")


def special_tokens(model_config: PretrainedConfig, name: str) -> tuple[int, int]:
    """`(pad_token_id, decoder_start_token_id)` of the model.

    Raises:
        UserError: the config lacks one of them.
    """
    pad, start = model_config.pad_token_id, getattr(model_config, "decoder_start_token_id", None)
    if start is None:
        start = model_config.bos_token_id
    for token, value in (("pad_token_id", pad), ("decoder_start_token_id", start)):
        if value is None:
            raise UserError(f"the config.json of {name} has no {token}: add it")
    return int(pad), int(start)


def _attention(config: ModelConfig) -> dict[str, Any]:
    return {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
