"""Which recipe a command line and its run YAMLs are for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.load import split_files_and_flags
from toolkit.config.messages import given_flags
from toolkit.config.paths import find_path
from toolkit.config.python import CONFIGS
from toolkit.errors import UserError

RECIPES = {"seq2seq": "t5", "causal": "llm"}
"""By the objective."""
OF_PAIRS = {"t5": "dpo_t5", "llm": "dpo"}
"""The recipe of pairs of answers to each of these."""


def find_recipe(argv: list[str], recipe: str | None = None, model: str | None = None) -> str:
    """`recipe`, else the run YAMLs' own, else the one that takes the model (`model`, or that of the command line), of pairs where
    they set `preference.loss`.

    Raises:
        UserError: there is no such recipe, or the model's path is ambiguous.
    """
    if named := recipe or _find_value(argv, "recipe")[0]:
        if named not in CONFIGS:
            raise UserError(f"recipe is {named}: write {' or '.join(CONFIGS)}, or leave it out, and the model chooses")
        return named
    if model is None:
        model, file = _find_value(argv, "model.name_or_path")
        model = find_path(model, file, f"{file}: model.name_or_path") if file else model
    found = RECIPES[name_of_model(model)]
    return OF_PAIRS[found] if _find_value(argv, "preference.loss")[0] else found  # every run folder of pairs has it


def _find_value(argv: list[str], key: str) -> tuple[str, Path | None]:
    """A text of the flags, else of the last run YAML that has it, with that file. Empty if none has: `load_config` reports it."""
    files, flags = split_files_and_flags(argv)
    if given := dict(reversed(given_flags(flags))).get(key):
        return given, None
    for file in reversed(files):
        with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            written: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            for name in key.split("."):
                written = written[name]
            if isinstance(written, str):
                return written, Path(file)
    return "", None


def name_of_model(name_or_path: str) -> str:
    """The built-in objective that takes the model, by name; for an unreadable folder `causal`: `load_model_config` reports it.

    Raises:
        UserError: a hub id is out of reach; without this error, `load_model_config` would retry for half a minute.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        is_pair = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False).is_encoder_decoder
        return "seq2seq" if is_pair else "causal"
    except (ValueError, StrictDataclassError):
        return "causal"
    except OSError as error:
        if Path(name_or_path).is_dir() or Path(name_or_path).is_absolute() or name_or_path.startswith("."):
            return "causal"
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UserError(
            f"model {name_or_path} is not a local folder and could not be read from the hub ({reason}): give a folder with its "
            "config.json"
        ) from None
