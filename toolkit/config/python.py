"""Reads a run config from Python: the same YAML and the same keys as on a command line."""

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from toolkit.config.load import RecipeConfig
from toolkit.config.load import load_config as load_from_arguments
from toolkit.config.schema import LLMConfig, PreferenceConfig, Seq2SeqPreferenceConfig, SummarizationConfig
from toolkit.config.validate import check_config
from toolkit.errors import UserError

CONFIGS: dict[str, type[RecipeConfig]] = {
    "t5": SummarizationConfig, "llm": LLMConfig, "dpo": PreferenceConfig, "dpo_t5": Seq2SeqPreferenceConfig,
}  # fmt: skip


def load_config(
    recipe: str, path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | None = None
) -> RecipeConfig:
    """The config of a run for `toolkit.finetune`.

    Args:
        recipe: `t5` for an encoder-decoder, with the keys of `recipes/t5.py --help`; `llm` for a causal model, with those of
            `recipes/llm.py --help`; `dpo_t5` or `dpo` to train either on pairs of answers, with those of `recipes/dpo.py --help`.
        path: a run YAML.
        overrides: dotted keys with values, as in `{"optim.lr": 1e-4}`; they win over the YAML. A list replaces the YAML's.
            Relative paths in them start at the working directory.

    Raises:
        UserError: as on the command line. `data.source` may be left out: `finetune` then needs its argument `train`.
    """
    if recipe not in CONFIGS:
        raise UserError(f"recipe is {recipe!r}: choose one of {', '.join(CONFIGS)}")
    argv = [] if path is None else ["--config", os.fspath(path)]
    for key, value in (overrides or {}).items():
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        argv.append(f"--{key}={value if isinstance(value, str) else json.dumps(value, default=os.fspath)}")
    return load_from_arguments(CONFIGS[recipe], argv, check=partial(check_config, needs_source=False))
