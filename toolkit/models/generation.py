"""Makes the generation config of evaluations and exports: what the run YAML sets, then what is valid of the base's."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import EvalConfig, ModelConfig
from toolkit.errors import UserError
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger("toolkit")

_LEFT_OUT = {
    r"(output|return)_\w+|num_return_sequences": "it changes the type of the output",
    # By hand: transformers says only in comments that these moved to the hub, and which of the next are for speed.
    "penalty_alpha|dola_layers|num_beam_groups|diversity_penalty|constraints|force_words_ids|low_memory": (
        "transformers runs it by code of the hub"
    ),
    r"\w*(cache|compile)\w*|prompt_lookup_\w+|assistant_early_exit|use_mtp|continuous_batching_\w+|prefill_chunk_size": (
        "it is for speed or memory, and not for every batch and device"
    ),
    "max_length": "max_new_tokens limits the texts",
}
"""What is left out of every generation config, by its names, and why."""
_OF_RUNS = dict.fromkeys(("stop_strings", "token_healing"), "plain `generate` needs the tokenizer for it")
_OF_RUNS |= {"max_time": "texts would depend on the machine", "do_sample": "evaluations do not sample"}


def choose_generation(config: EvalConfig, model: PreTrainedModel, base: ModelConfig) -> EvalConfig:
    """Give the model, which may be on the meta device, a run's generation config; returns the config with the base's values where
    it leaves them unset. Settings of the base that cannot be read are a `UserError`."""
    theirs = {"eos_token_id": getattr(model.config, "eos_token_id", None), **load_settings(base)}
    standard = {"num_beams": 1, "no_repeat_ngram_size": 0}
    unset: dict[str, Any] = {key: theirs.get(key) or standard[key] for key in standard if getattr(config, key) is None}
    config = replace(config, **unset)
    ours = {key: getattr(config, key) for key in ("max_new_tokens", "num_beams", "no_repeat_ngram_size")}
    reasons = _OF_RUNS | {key: f"eval.{key} is {value}" for key, value in ours.items()}
    model.generation_config = build_generation(
        model, theirs, {"do_sample": False, **ours}, reasons, base.name_or_path, logging.INFO
    )
    if (beams := unset.get("num_beams", 1)) > 1:
        logger.info(f"{beams} beams take about {beams} times the time and cache of greedy decoding, which is eval.num_beams 1")
    return config


def list_end_ids(model: Any, others: Iterable[int] = ()) -> list[int]:
    """The tokens that end a text for the model's generation config, and others."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return sorted({*others, *(own if isinstance(own, list) else [own])} - {None})


def load_settings(base: ModelConfig) -> dict[str, Any]:
    """What the `generation_config.json` of a folder or of the hub sets, else what an old `config.json` does; a `UserError` if it
    cannot be read."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    path = Path()
    for name in ("config.json", "generation_config.json"):
        with suppress(OSError):  # there is no such file
            path = Path(cached_file(base.name_or_path, name, revision=base.revision) or "")
    if not path.name:
        return {}
    try:
        settings = dict(json.loads(path.read_text(encoding="utf-8")))
        if path.name == "config.json":
            known = {key: value for key, value in settings.items() if not _why_left_out(key)}
            settings = GenerationConfig.from_model_config(known).to_diff_dict()
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(f"the {path.name} of {base.name_or_path}", error) from None
    return {key: value for key, value in settings.items() if key[0] != "_" and key != "transformers_version"}


def build_generation(
    model: PreTrainedModel, theirs: dict[str, Any], ours: dict[str, Any], reasons: dict[str, str], name: str, level: int
) -> GenerationConfig:
    """Our settings, and of `theirs`, those of the model `name`, what is valid beside them and has no reason against it. Logs a
    line of `level` for each one that is left out, and at INFO for those that are taken. One of a wrong type is a `UserError`."""
    made: Any = type(model.generation_config)()
    known = {*vars(made)}
    # transformers' cache needs the number of layers, which the config of a BLT lacks.
    vars(made).update(ours, use_cache=hasattr(model.config.get_text_config(decoder=True), "num_hidden_layers"))
    defaults, taken = private("_get_default_generation_params", made)(), list[str]()
    what = f"the generation config of {name}"
    for key, value in theirs.items():
        shown, default = f"{key} {json.dumps(value)[:40]}", defaults.get(key)
        standard = {"use_cache": True, **ours}.get(key, default)
        is_whole = type(default) is int or key.endswith("_token_id")
        of_type = (int, type(None)) if is_whole else (int, float, type(None))
        values = value if isinstance(value, list) and key.endswith("_token_id") else [value]
        if (is_whole or type(default) is float) and not all(type(one) in of_type for one in values):
            raise _unreadable(what, TypeError(f"{key} is {value!r}"))
        why = reasons.get(key) or _why_left_out(key)
        if value not in (None, standard) and (value or standard or not why):
            trial = copy.copy(made)
            try:
                if not why:
                    trial.update(**{key: value}) if isinstance(value, dict) else setattr(trial, key, value)
                    why = _why_invalid(trial, key, value)
            except (TypeError, AttributeError, ValueError) as error:
                raise _unreadable(what, error) from None
            if why:
                logger.log(level, f"{shown} of {what} is left out: {why}")
                continue
            made = trial
        if value not in (None, False, default) and key in known and not key.endswith("_token_id"):
            taken.append(shown)
    if taken and level == logging.INFO:
        logger.info(f"texts are generated with {', '.join(taken)} of {what}")
    return made


def _why_left_out(key: str) -> str:
    return next((why for names, why in _LEFT_OUT.items() if re.fullmatch(names, key)), "")


def _why_invalid(made: GenerationConfig, key: str, value: Any) -> str:
    """Why transformers refuses the config, for this setting; empty if it does not."""
    if key in ("min_length", "min_new_tokens") and value > made.max_new_tokens:
        return f"texts have up to {made.max_new_tokens} tokens"
    try:
        made.validate(strict=True)
    except ValueError as error:
        for what, change in (("beams", {"num_beams": 2}), ("sampling", {"do_sample": True})):
            other = copy.copy(made)
            vars(other).update(change)
            with suppress(ValueError):
                other.validate(strict=True)
                return f"it needs {what}"
        return " ".join(str(error).split())
    return ""


def _unreadable(what: str, error: Exception) -> UserError:
    return UserError(f"{what} cannot be read ({' '.join(str(error).split())}): correct or remove it")
