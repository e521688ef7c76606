"""Which model a command line and its run YAMLs are about, and which recipe it takes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.flags import split_files_and_flags
from toolkit.config.messages import given_flags
from toolkit.config.paths import find_path
from toolkit.config.python import CONFIGS
from toolkit.errors import UserError


def find_model(argv: list[str]) -> str:
    """`model.name_or_path` of flags, else of run YAMLs. Empty if none says, which `load_config` reports better.

    Raises:
        UserError: the path is ambiguous.
    """
    files, flags = split_files_and_flags(argv)
    name = ""
    for file in files:
        written: Any = None
        with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            written = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["model"]["name_or_path"]
        if isinstance(written, str):
            name = find_path(written, Path(file), f"{file}: model.name_or_path")
    return dict(reversed(given_flags(flags))).get("model.name_or_path", name)


def config_class_of(model: str, recipe: str | None) -> Any:
    """The config class of `recipe`, as in `t5`, else of the recipe that the model takes."""
    return CONFIGS[recipe or ("t5" if is_encoder_decoder(model) else "llm")]


def is_encoder_decoder(name_or_path: str) -> bool:
    """Whether the model is an encoder-decoder. False for an unreadable folder: `load_model_config` reports what is wrong.

    Raises:
        UserError: a hub id is out of reach; without this error, `load_model_config` would retry for half a minute.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.from_pretrained(name_or_path, trust_remote_code=False).is_encoder_decoder)
    except (ValueError, StrictDataclassError):
        return False
    except OSError as error:
        if Path(name_or_path).is_dir() or Path(name_or_path).is_absolute() or name_or_path.startswith("."):
            return False
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UserError(
            f"model {name_or_path} is not a local folder and could not be read from the hub ({reason}): give a folder with its "
            "config.json"
        ) from None
