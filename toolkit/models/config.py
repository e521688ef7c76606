"""Reads a model's `config.json`, and refuses what cannot be trained here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError, first_line
from toolkit.files.durable import check_readable, refuse_pointers
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS_FILES = ("model.safetensors", WEIGHTS_INDEX)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""How a model that takes images or sound has them processed; an export copies them."""
DEQUANTIZED = ("bitsandbytes nf4", "mxfp4", "fp8 in blocks of [128, 128]")
"""Formats of quantized weights that `dequantize.py` reads."""
_OF_A_SET = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
LAYER_DROP_RATES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def load_model_config(config: ModelConfig, objective: Objective, *, is_trained: bool = True) -> PretrainedConfig:
    """Read the model's `config.json` from a folder or the hub; if it `is_trained`, check that it can be, and set `model.dropout`;
    a `UserError` if there is no such model or config, if it is of another kind, or its weights are not safetensors files of its
    own, or quantized in a format that is not read."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.utils import cached_file

    name, folder = config.name_or_path, Path(config.name_or_path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(f"model.name_or_path {name} is an adapter: give its base there, and this as adapter.name_or_path")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model.name_or_path {name} has no config.json: give a Hugging Face model folder")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise UserError(f"model.name_or_path {name} is not a folder here: give an existing folder or a hub id")
    refuse_pointers(folder / file for file in ("config.json", *PROCESSOR_FILES))
    if folder.is_dir() and not config.from_scratch:
        check_weight_files(folder, f"model.name_or_path {name}")
    try:
        model_config = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
        index = None
        if not (folder.is_dir() or config.from_scratch):  # loading the weights needs it anyway
            at = hub_commit(config) or config.revision
            index = cached_file(name, WEIGHTS_INDEX, revision=at, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        is_strict = isinstance(error, StrictDataclassError)  # the first line has the key, the second the reason
        reason = "config.json: " + " ".join(str(error).split()) if is_strict else first_line(error)
        raise UserError(
            f"model.name_or_path {name} could not be read ({reason}): give a Hugging Face model folder, or a hub id within reach"
        ) from None
    # Refuse weights elsewhere, code from the hub, and models of another kind.
    if index is not None:
        _check_index(Path(index), f"model.name_or_path {name}")
    if (file := getattr(model_config, "transformers_weights", None)) not in (None, *WEIGHTS_FILES) and not config.from_scratch:
        raise UserError(f"the config.json of {name} names weights that are not read, transformers_weights {file!r}: take it out")
    named = [private("_attn_implementation", part) for part in _parts(model_config)]
    kernels = [own for own in named if "/" in (own or "")]
    if kernels and not (config.attn_implementation or config.trust_remote_code):
        what = f"the config.json of {name} names the attention {kernels[0]}, which is code of the hub"
        raise UserError(f"{what}: set model.attn_implementation sdpa or eager, or model.trust_remote_code true")
    _take_quantization(model_config, name)
    auto_class = objective.loader(model_config)
    if not config.trust_remote_code and type(model_config) not in private("_model_mapping", auto_class):
        raise UserError(f"model.name_or_path {name} is a {model_config.model_type} model, not {objective.takes}")
    objective.check_model_config(model_config, config)
    if is_trained:
        _set_for_training(model_config, config)
    return model_config


def _take_quantization(model_config: PretrainedConfig, name: str) -> None:
    """Refuse quantized weights that `dequantize.py` does not read; others are plain when they are loaded, also for the config."""
    for about in pop_quantization(model_config):
        four_bits = about.get("bnb_4bit_quant_type", "fp4") if about.get("load_in_4bit") else "int8"
        kinds = {"bitsandbytes": four_bits, "fp8": f"in blocks of {about.get('weight_block_size', [128, 128])}"}
        method = str(about.get("quant_method"))
        if (quantized := f"{method} {kinds.get(method, '')}".strip()) not in DEQUANTIZED:
            what = f"model.name_or_path {name} is quantized as {quantized}"
            raise UserError(f"{what}, and only {', '.join(DEQUANTIZED)} are read: give it in full precision")


def pop_quantization(model_config: PretrainedConfig) -> list[dict[str, Any]]:
    """Take the settings of quantized weights out of a config and those nested in it, in place."""
    found = [vars(part).pop("quantization_config", None) for part in _parts(model_config)]
    return [about for about in found if about]


def _parts(model_config: PretrainedConfig) -> list[PretrainedConfig]:
    """The config, and those nested in it, as of a model of text and images, which may have settings of their own."""
    nested: list[Any] = [getattr(model_config, key, None) for key in model_config.sub_configs]
    return [model_config, *(part for part in nested if hasattr(part, "to_dict"))]


def _set_for_training(model_config: PretrainedConfig, config: ModelConfig) -> None:
    """Set `model.dropout`, and what no run can train with, in place, also in nested configs; refuse models that need a loss of
    their own."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    if not getattr(model_config, "disable_ngram_loss", True) and model_config.ngram > 1:
        what = f"model.name_or_path {config.name_or_path} predicts {model_config.ngram} tokens at once (ngram)"
        raise UserError(f"{what}, so its loss is not that of its labels: set disable_ngram_loss true in its config.json")
    for part in _parts(model_config):
        for key, value in part.to_dict().items() if config.dropout is not None else ():
            # Every family has names of its own: `attention_dropout`, `resid_pdrop`, …
            if "drop" in key and "layerdrop" not in key and type(value) in (int, float):
                try:
                    setattr(part, key, 0 if type(value) is int and not config.dropout else config.dropout)
                except StrictDataclassFieldValidationError:
                    what = f"{key} of a {part.model_type or model_config.model_type}, which is declared a whole number"
                    raise UserError(f"model.dropout {config.dropout} cannot be {what}: set it to 0, or leave it out") from None
        for rate in LAYER_DROP_RATES:
            if getattr(part, rate, None):
                # If one rank drops a layer, the others hang in its collectives (M2M100 has a rate of 0.05).
                setattr(part, rate, 0.0)
                logger.warning(f"{rate} of {config.name_or_path} is set to 0: every rank must run every layer")
    if not model_config.return_dict:
        model_config.return_dict = True
        logger.warning(f"return_dict of {config.name_or_path} is set to true: outputs are read by their names")


def check_weight_files(folder: Path, what: str) -> None:
    """Refuse a folder whose weights are git-lfs pointers or two sets, or that transformers would unpickle or load from elsewhere,
    by a `UserError` with the file and the entry; `what` is its setting and path."""
    check_readable(what, folder)
    refuse_pointers(folder / name for name in ("config.json", "generation_config.json", *WEIGHTS_FILES))
    if (folder / "adapter_config.json").is_file():  # transformers would load the adapter too, even from a pickle
        raise UserError(f"{what} has an adapter_config.json too: give the model alone, and the adapter as adapter.name_or_path")
    named = _check_index(folder / WEIGHTS_INDEX, what) if (folder / WEIGHTS_INDEX).is_file() else set()
    refuse_pointers(folder / shard for shard in sorted(named))
    # Each file once; nobody can tell which set is meant. Files of other formats (.bin, consolidated) are often beside them.
    stored = {path.name for path in folder.glob("*.safetensors") if path.name in named or _OF_A_SET.fullmatch(path.name)}
    sets = [sorted(files) for files in (stored & {WEIGHTS_FILES[0]} - named, stored & named, stored - named - {WEIGHTS_FILES[0]})]
    if len(found := [files for files in sets if files]) > 1:
        one, other = (f"{files[0]}{f' and {len(files) - 1} more' * (len(files) > 1)}" for files in found[:2])
        by_index = f", of which {WEIGHTS_INDEX} names {sets[1][0]}" if sets[1] else ""
        raise UserError(f"{what} holds two sets of weights, {one} and {other}{by_index}: keep one of them there")


def special_tokens(model_config: PretrainedConfig, name: str) -> tuple[int, int]:
    """`(pad_token_id, decoder_start_token_id)` of the model; a `UserError` if its config lacks one of them."""
    pad, start = model_config.pad_token_id, getattr(model_config, "decoder_start_token_id", None)
    if start is None and model_config.sub_configs:  # T5Gemma's
        start = getattr(model_config, "bos_token_id", None)
    for token, value in (("pad_token_id", pad), ("decoder_start_token_id", start)):
        if value is None:
            raise UserError(f"the config.json of {name} has no {token}: add it")
    return int(pad), int(start)  # type: ignore[arg-type]  # neither is None


def hash_model_config(settings: dict[str, Any]) -> str:
    """sha256 of a model's `config.json`, without the version that wrote it."""
    kept = {key: value for key, value in settings.items() if key != "transformers_version" and not key.startswith("_")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _check_index(index: Path, what: str) -> set[str]:
    """The files that an index names; anything but safetensors files in its own folder is refused."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        foreign = [file for file in files if PurePath(file).name != file or not file.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the {WEIGHTS_INDEX} of {what} cannot be read ({reason}): save the model again") from None
    if foreign:
        raise UserError(f"the {WEIGHTS_INDEX} of {what} names {foreign[0]!r}, not a safetensors file beside it: save it again")
    return {*files}


def hub_commit(config: ModelConfig) -> str | None:
    """The commit that a hub model was read at, as the hub's cache has it; None for a folder."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    file: Any = None
    if not Path(config.name_or_path).is_dir():  # the hub may have a model of that name, too
        with contextlib.suppress(HFValidationError):  # a path is not a hub id
            file = try_to_load_from_cache(config.name_or_path, "config.json", revision=config.revision)
    return Path(file).parent.name if isinstance(file, str) else None
