"""Hugging Face encoder-decoder models: early checks on a weightless skeleton, loading, freezing."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from toolkit.config import ModelConfig
from toolkit.data.collate import check_label_shift
from toolkit.distributed import seed_all
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DROPOUT_RATES = ("dropout", "dropout_rate", "attention_dropout", "activation_dropout")


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """Read the model's `config.json`, from a folder or the hub, with `model.dropout` put in.

    Raises:
        UserError: no such model, no config, or a model that is no encoder-decoder.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    name = config.name_or_path
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model.name_or_path {name} has no config.json: give a Hugging Face model folder")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise UserError(f"model.name_or_path {name} is not a folder here: give an existing folder or a hub id")
    try:
        model_config = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"model.name_or_path {name} could not be read ({first_line})") from None
    if not config.trust_remote_code and type(model_config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model.name_or_path {name} is a {model_config.model_type} model, not an encoder-decoder that generates text: "
            "take one such as T5, BART or Pegasus"
        )
    if any(getattr(model_config, key, None) for key in ("num_experts", "num_local_experts")):
        raise UserError(
            f"model.name_or_path {name} is a mixture of experts: its auxiliary loss is a mean over each micro-batch, which "
            "cannot be made exact over the global batch, so it is not supported"
        )
    if config.dropout is not None:
        for rate in DROPOUT_RATES:
            if hasattr(model_config, rate):
                setattr(model_config, rate, config.dropout)
    return model_config


def build_skeleton(config: ModelConfig, model_config: PretrainedConfig) -> PreTrainedModel:
    """The model without weights (meta device): names, shapes and classes for checks that should not wait for a download.

    Raises:
        UserError: the attention implementation does not exist for this model, or labels are shifted in a way of its own.
    """
    from transformers import AutoModelForSeq2SeqLM

    try:
        with torch.device("meta"):
            model = AutoModelForSeq2SeqLM.from_config(
                model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **_attention(config)
            )
    except (ValueError, ImportError) as error:
        raise UserError(f"model {config.name_or_path} cannot be built: {' '.join(str(error).split())}") from None
    check_label_shift(model, *special_tokens(model_config, config.name_or_path))
    return model


def load_model(config: ModelConfig, model_config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model on the CPU in fp32, with random weights (`from_scratch`, drawn from `seed`) or its pretrained ones."""
    from transformers import AutoModelForSeq2SeqLM

    if config.from_scratch:
        seed_all("weights", seed)
        model = AutoModelForSeq2SeqLM.from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **_attention(config)
        )
    else:
        try:
            model = AutoModelForSeq2SeqLM.from_pretrained(
                config.name_or_path,
                config=model_config,
                revision=config.revision,
                dtype=torch.float32,
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
    return model


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Freeze every parameter one of whose names (tied aliases included) is matched whole by a pattern; returns the names.

    Raises:
        UserError: a pattern that is no regular expression or matches nothing, or nothing left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    frozen = []
    for pattern in patterns:
        try:
            matched = [(name, p) for name, p in named if re.fullmatch(pattern, name)]
        except re.error as error:
            raise UserError(f"model.freeze {pattern!r} is not a regular expression ({error})") from None
        if not matched:
            raise UserError(f"model.freeze {pattern!r} matches no parameter; names look like {named[0][0]}, {named[-1][0]}")
        for name, parameter in matched:
            parameter.requires_grad_(False)
            frozen.append(name)
    if not any(p.requires_grad for _, p in named):
        raise UserError(f"model.freeze {patterns} freezes every parameter: leave something to train")
    return frozen


def hash_frozen(model: nn.Module) -> str | None:
    """sha256 of names, dtypes, shapes and bytes of the frozen parameters of an unsharded model; None where all train.

    Checkpoints leave frozen weights out and record this instead, so that a resume can tell another base.
    """
    digest, has_frozen = hashlib.sha256(), False
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            has_frozen = True
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest() if has_frozen else None


def num_token_embeddings(model: PreTrainedModel) -> int:
    """Rows of the input embedding: the largest vocabulary that the model takes."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def check_vocabulary(num_tokenizer_tokens: int, num_embeddings: int) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings.

    Raises:
        UserError: naming both numbers.
    """
    if num_tokenizer_tokens > num_embeddings:
        raise UserError(
            f"the tokenizer has {num_tokenizer_tokens} tokens, but the model only {num_embeddings} embeddings: "
            "take the tokenizer that belongs to the model"
        )


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
