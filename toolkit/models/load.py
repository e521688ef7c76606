"""Builds Hugging Face models on the meta device, and loads in full, on the CPU, what cannot be read in parts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import find_or_build, name_folder
from toolkit.data.tokens.tokenizer import hash_tokenizer, load_tokenizer, read_tokenizer, trains_tokenizer
from toolkit.distributed.comm import gather_objects, on_all_ranks
from toolkit.distributed.rng import seed_all
from toolkit.errors import UserError, first_line
from toolkit.models.freeze import hash_tensor
from toolkit.models.safetensors_index import (
    Match,
    ShardedReadUnsupported,
    check_loaded,
    find_weight_files,
    match_files,
    open_files,
)
from toolkit.private import LOAD_REPORT, private
from toolkit.variables import local_rank

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from toolkit.objectives.objective import Objective


@contextmanager
def own_class(given: Any, config: ModelConfig, objective: Objective) -> Iterator[None]:
    """Let whatever loads a model of its kind take the class of `given`, a class or a built model; None changes nothing. One that
    does not fit objective or config is a `UserError`."""
    import transformers

    is_new = config.from_scratch or not (given is None or isinstance(given, type))
    if config.train_tokenizer and not (is_new and config.init_from is config.tokenizer is config.add_tokens is None):
        which = "a model built in Python or from scratch, without model.init_from, model.tokenizer and model.add_tokens"
        raise UserError(f"model.train_tokenizer is true, which is for {which}: leave one out")
    if given is None:
        yield
        return
    own: Any = given if isinstance(given, type) else type(given)
    is_model = issubclass(own, transformers.PreTrainedModel) and own.can_generate()
    kinds: Any = private("_model_mapping", objective.loader(own.config_class)) if is_model else {}
    if not is_model or own.config_class not in kinds:
        raise UserError(f"model is a {own.__name__}, not {objective.takes}, its class, or one that inherits from it")
    of_path: dict[str, Any] = {}
    with suppress(OSError):  # a tokenizer without a config, or reported with the config
        of_path, _ = transformers.PreTrainedConfig.get_config_dict(config.name_or_path, revision=config.revision)
    theirs, ours = of_path.get("model_type"), own.config_class.model_type
    if theirs not in (None, ours):
        what = f"model is a {own.__name__}, for {ours} models"
        raise UserError(f"{what}, but model.name_or_path {config.name_or_path} is a {theirs} model: name one of its kind")
    if given is not own and (config.from_scratch or config.init_from):
        key = "from_scratch" if config.from_scratch else "init_from"
        raise UserError(f"model is built, and model.{key} asks for other weights: give the class {own.__name__}, or take it out")
    before = kinds[own.config_class]
    kinds.register(own.config_class, own, exist_ok=True)
    try:
        yield
    finally:
        kinds.register(own.config_class, before, exist_ok=True)


def save_built(model: PreTrainedModel, config: ModelConfig, cache: Path) -> ModelConfig:
    """Write a built model, and the tokenizer of `model.name_or_path`, to the cache of each node's first process; returns the
    config that reads it as a folder. A module that is not as its class builds it, a frozen parameter, a tokenizer that cannot be
    read, a cache that cannot be written, or nodes with different models are a `UserError` on every rank. Collective."""

    def save() -> str:
        def write(folder: Path) -> dict[str, Any]:
            with mock.patch.object(model, "generation_config", type(model.generation_config)()):
                for part in (model, tokenizer) if tokenizer else (model,):
                    part.save_pretrained(folder)
            model.generation_config.to_json_file(folder / "generation_config.json")  # `save_pretrained` refuses some of them
            return {}

        tokenizer = None if trains_tokenizer(config) else read_tokenizer(config)
        with torch.device("meta"):
            again = type(model)(copy.deepcopy(model.config))
        if repr(model) != repr(again):
            name = type(model).__name__
            raise UserError(f"model has modules that {name} does not build from its config: change them in a class")
        built = again.named_parameters()
        if frozen := [own for own, parameter in built if parameter.requires_grad > model.get_parameter(own).requires_grad]:
            raise UserError(f"model has frozen {frozen[0]}, which a run does not see: name what is frozen in model.freeze")
        weights = {name: hash_tensor(tensor, tensor.dtype) for name, tensor in model.state_dict().items()}
        of_tokenizer = tokenizer and [hash_tokenizer(tokenizer), str(tokenizer.init_kwargs), tokenizer.chat_template]
        of_model = {"model": repr(model.config), "generation": model.generation_config.to_json_string(), "weights": weights}
        name = name_folder(of_model | {"tokenizer": of_tokenizer})
        find_or_build("the built model", cache / "models" / name, write)
        return name

    names = {name for name in gather_objects(on_all_ranks(lambda: save() if local_rank() == 0 else "")) if name}
    if len(names) > 1:
        raise UserError("the nodes have built different models: seed what is random, and read the same files on each")
    return replace(config, name_or_path=str(cache / "models" / names.pop()), revision=None, tokenizer=None)


def build_skeleton(config: ModelConfig, model_config: PretrainedConfig, objective: Objective) -> PreTrainedModel:
    """The model on the meta device, for checks before any weights are downloaded. An attention implementation that does not
    exist for this model is a `UserError`; others are those of `grow_vocabulary`."""
    import transformers

    if config.add_tokens:
        model_config = copy.deepcopy(model_config)  # stays that of the files
    try:
        with torch.device("meta"):
            model = objective.loader(model_config).from_config(model_config, dtype=torch.float32, **_options(config))
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        if config.attn_implementation:
            what = f"model.attn_implementation {config.attn_implementation} cannot be used with {config.name_or_path}"
            raise UserError(f"{what} ({reason.split('. ')[0]}): take sdpa or eager, or leave it out") from None
        raise UserError(f"model {config.name_or_path} cannot be built from its config.json: {reason}") from None
    if not model.can_generate():  # then it has none, and no text to end
        model.generation_config = transformers.GenerationConfig()
    grow_vocabulary(model, config)
    return model


class _Writes(TorchDispatchMode):
    """Context that collects the storages of what is written in place: `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self.found.add(private("_cdata", args[0].untyped_storage()))
        return function(*args, **(kwargs or {}))


def check_kept(model: PreTrainedModel, name: str) -> None:
    """Refuse a model on the meta device whose class sets weights anew after transformers has loaded them, by a `UserError`: a
    Youtu's row of the padding token. An export would load as another model."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # as when its value has been loaded
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    with _Writes() as writes, torch.device("meta"), suppress(Exception):
        model.initialize_weights()
    if written := [own for own, p in model.named_parameters() if private("_cdata", p.untyped_storage()) in writes.found]:
        what = f"{min(written)} of {name}, or a part of it, anew whenever it loads a {model.config.model_type}"
        remedy = "if it is the row of the padding token, set pad_token_id null in a copy of its config.json"
        raise UserError(f"transformers sets {what}, so that an export would load as another model: {remedy}")


def build_on_meta(
    config: ModelConfig, model_config: PretrainedConfig, objective: Objective, dtype: torch.dtype
) -> PreTrainedModel:
    """The model that `load_model` would load in `dtype`, but with parameters on the meta device; buffers are on the CPU."""
    # Structure and ties, without drawing weights.
    from accelerate import init_empty_weights

    model_config = copy.deepcopy(model_config)
    model_config.name_or_path = config.name_or_path
    with private("no_init_weights")(), init_empty_weights(include_buffers=False):
        model = objective.loader(model_config).from_config(model_config, dtype=dtype, **_options(config))
    model.tie_weights()
    # Recompute buffers that are in no file, as `from_pretrained` does: a constructor in bf16 rounds GPT-J's positions.
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    if config.trust_remote_code:  # `from_pretrained` takes its generate function at its end
        hub: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "subfolder": ""}
        hub |= {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": False, "token": None}
        model.adjust_generation_fn(None, True, False, config.name_or_path, **hub)
    return model.eval()


def load_model(
    config: ModelConfig, model_config: PretrainedConfig, objective: Objective, seed: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model on the CPU in `dtype`, without new tokens, with its pretrained weights, or random ones drawn from `seed` if
    `from_scratch`; a head that they lack is drawn too where the objective allows it. Safetensors weights that are missing,
    incomplete or of another shape are a `UserError`."""
    import transformers

    if config.from_scratch or objective.may_draw_head:
        seed_all("weights", seed)
    if config.from_scratch:
        model = objective.loader(model_config).from_config(model_config, dtype=dtype, **_options(config))
    else:
        options = {"config": model_config, "revision": config.revision, "dtype": dtype, **_options(config)}
        if not config.trust_remote_code:  # `choose_generation` reads the base's, of which transformers may refuse some keys
            options["generation_config"] = transformers.GenerationConfig()
        model, match = from_files(
            objective.loader(model_config), config.name_or_path, f"model {config.name_or_path}", options,
            lambda: build_on_meta(config, model_config, objective, dtype),
            ": give a folder with them, or model.from_scratch true for random ones",
        )  # fmt: skip
        check_loaded(objective, model, config.name_or_path, match)
    return model


def from_files(
    model_class: Any, name: str, what: str, options: dict[str, Any], build: Callable[[], Any], remedy: str = ""
) -> tuple[PreTrainedModel, Match]:
    """`from_pretrained` of safetensors files with `options`, dequantized if they are quantized; the model, and what does not fit
    it. Of the model that `build` makes only class and configs are taken. No such files, or such that cannot be read, are a
    `UserError` that names them by `what`, their setting and path."""
    from transformers import PreTrainedConfig

    # Unless the options say otherwise, the caller's error names the first shape that differs.
    options = {"revision": None, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    try:
        settings, _ = PreTrainedConfig.get_config_dict(name, revision=options["revision"])
        nested = [value for value in settings.values() if isinstance(value, dict)]
        if not any(part.get("quantization_config") for part in (settings, *nested)):
            model, match = _load(model_class, name, use_safetensors=True, **options)
            with suppress(ShardedReadUnsupported):  # nothing is read but headers, and what has two names
                match_files(model, name, options["revision"], what)
            return model, match
        stored = open_files(find_weight_files(name, options["revision"]), what)
    except (OSError, ShardedReadUnsupported, SafetensorError) as error:
        raise UserError(f"{what} has no loadable safetensors weights ({first_line(error)}){remedy}") from None
    # transformers takes either a name or tensors. On the meta device nothing is read.
    built, is_meta = build(), torch.device("meta") in options.get("device_map", {}).values()
    state = {key: torch.empty(one.shape, device="meta") if is_meta else one.read_all() for key, one in stored.items()}
    model, match = _load(type(built), None, state_dict=state, **options | {"config": built.config})
    model.name_or_path = model.config.name_or_path = built.name_or_path
    model.generation_config = built.generation_config
    return model, match


def _load(model_class: Any, name: str | None, **options: Any) -> tuple[PreTrainedModel, Match]:
    """`from_pretrained` without transformers' table of names that do not match, except for errors: callers have own words."""

    def is_kept(record: logging.LogRecord) -> bool:
        return LOAD_REPORT not in (text := record.getMessage()) or "CONVERSION" in text

    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addFilter(is_kept)
    try:
        model, report = model_class.from_pretrained(name, **options)
    finally:
        theirs.removeFilter(is_kept)
    other_shapes = {own: tuple(stored) for own, stored, _ in report["mismatched_keys"]}
    return model, Match({}, sorted(report["missing_keys"]), other_shapes, sorted(report["unexpected_keys"]))


def num_token_embeddings(model: PreTrainedModel) -> int:
    """The largest vocabulary that fits: rows of the input embedding or of the head, which may differ, whichever are fewer."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(cast(nn.Embedding, module).weight.shape[0] for module in embeddings if module is not None)


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, config: ModelConfig) -> set[str]:
    """Give a model on the meta device, without an adapter, the rows that it lacks for the tokenizer with `model.add_tokens`, in
    place. Returns the names of the parameters that have grown, tied aliases included. A model of a class that transformers cannot
    resize is a `UserError`; others are those of `load_tokenizer`."""
    needed = 1 + max(load_tokenizer(config).get_vocab().values()) if config.add_tokens else 0
    if needed <= num_token_embeddings(model):
        return set()
    before = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        resize_rows(model, needed)
    except (NotImplementedError, TypeError) as error:
        raise UserError(f"model.add_tokens needs {needed} rows, and transformers cannot resize this model: {error}") from None
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.shape != before[name]}


def resize_rows(model: PreTrainedModel, num_rows: int) -> None:
    """Let the embedding and the head have so many rows, in place; new rows have any values."""
    # Its tie_weights would tie a head that has values of its own (flan-T5's). What is tied stays so without it.
    with mock.patch.object(model, "tie_weights"):
        model.resize_token_embeddings(num_rows, mean_resizing=False)


def _options(config: ModelConfig) -> dict[str, Any]:
    named = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    return {"trust_remote_code": config.trust_remote_code, **named}
