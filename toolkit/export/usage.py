"""What using an exported model needs beside its weights: the run's generation settings, and how a text becomes tokens.

Generation settings go into the model's own `generation_config.json`, which every tool of transformers reads; without
`max_new_tokens` in it, plain `generate` stops after 20 tokens. What it has no key for goes into `toolkit.json`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.load import RecipeConfig
from toolkit.config.schema import EvalConfig
from toolkit.errors import UserError

SETTINGS_FILE = "toolkit.json"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How the run made tokens of texts, and how many rows its evaluations took at once. `toolkit.json` holds these fields."""

    prefix: str = ""
    """Text before every source."""
    max_source_length_tokens: int | None = None
    """Where an encoder-decoder's sources were cut; None: they were not."""
    source_language: str | None = None
    target_language: str | None = None
    source_column: str | None = None
    csv_delimiter: str | None = None
    encoding: str | None = None
    batch_size_rows: int = 8
    dtype: str = "float32"
    """Of the run's forward passes."""
    step: int | None = None
    """Of the run, whose weights these are."""
    weights_dtype: str | None = None
    """Of the exported weights."""
    add_tokens: list[str] | None = None
    """Tokens that an adapter's base lacks."""


def set_generation(generation: Any, config: EvalConfig, stop_token_ids: tuple[int, ...], pad_token_id: int) -> None:
    """Make `generate` do, without an argument, what the run's evaluations did.

    Args:
        generation: the model's `GenerationConfig`, which is changed.
        stop_token_ids: tokens that end a text in the rows, in addition to the model's own.
    """
    generation._from_model_config = False  # transformers 4 would take the model config's settings in place of such ones
    own = generation.eos_token_id
    stops = sorted({*stop_token_ids, *(own if isinstance(own, list) else [own])} - {None})
    generation.update(
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        do_sample=False,
        pad_token_id=pad_token_id,
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        # Settings of sampling beside do_sample=False are refused when the config is saved.
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p")),
    )


def save_usage(config: RecipeConfig, folder: Path, **facts: Any) -> None:
    """Write `toolkit.json`; `facts` are the fields of `Usage` that are not the config's."""
    names = [field.name for field in dataclasses.fields(Usage) if hasattr(config.data, field.name)]
    of_data = {name: getattr(config.data, name) for name in names}
    usage = Usage(batch_size_rows=config.eval.batch_size_rows, add_tokens=config.model.add_tokens, **of_data, **facts)
    (folder / SETTINGS_FILE).write_text(json.dumps(dataclasses.asdict(usage), indent=1) + "\n", encoding="utf-8")


def load_usage(folder: Path) -> Usage | None:
    """The settings of an exported model; None for a model that no run of ours exported.

    Raises:
        UserError: `toolkit.json` is not what `save_usage` writes.
    """
    path = folder / SETTINGS_FILE
    try:
        return Usage(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not what an export writes ({error}): export the model again, or remove the file") from None
