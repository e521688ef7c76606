"""The commands that follow an export: to use, serve, score and share this model, as far as each tool takes it.

vLLM has no T5 and no encoder-decoder of text, and takes neither DoRA nor modules that an adapter trains fully.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from toolkit.config.load import RecipeConfig
from toolkit.export.card import is_hub_id
from toolkit.export.write import Places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VLLM_RANK = 16
"""vLLM's default `--max-lora-rank`. It takes these."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def list_commands(config: RecipeConfig, skeleton: PreTrainedModel, places: Places) -> list[str]:
    """A line for each tool that takes the exported model, or the adapter if that is all there is."""
    folder = places.model or places.adapter
    assert folder is not None
    is_adapter, place = places.model is None, shlex.quote(str(folder))
    lines = [f"use it: python -m toolkit generate {place} --file FILE.csv --output OUT.jsonl"]
    if config.task.pipeline_tag == "text-generation" and (serve := _serve(config, skeleton, place, is_adapter=is_adapter)):
        lines.append(f"serve it: {serve}")
    base, revision = shlex.quote(config.model.name_or_path), config.model.revision
    pretrained = f"{base},peft={place},tokenizer={place}" if is_adapter else place
    at = f",revision={revision}" if is_adapter and revision else ""
    lines.append(f"score it: lm_eval --model hf --model_args pretrained={pretrained}{at} --tasks TASK")
    if is_adapter and not is_hub_id(config.model.name_or_path):
        lines.append(f"share it: export it with --merge first, as its base {base} is a folder here")
    else:
        lines.append(f"share it: hf upload USER/NAME {place}")
    return lines


def _serve(config: RecipeConfig, skeleton: PreTrainedModel, place: str, *, is_adapter: bool) -> str | None:
    """vLLM's command; None if it does not take this adapter."""
    if not is_adapter:
        return f"vllm serve {place}"
    lora: Any = skeleton.peft_config["default"]  # type: ignore[index]
    rank = max(lora.r, *lora.rank_pattern.values()) if lora.rank_pattern else lora.r
    if lora.use_dora or lora.modules_to_save or rank > _VLLM_RANKS[-1]:
        return None
    needed = min(allowed for allowed in _VLLM_RANKS if allowed >= rank)
    ranks = f" --max-lora-rank {needed}" if needed > _VLLM_RANK else ""
    at = f" --revision {config.model.revision}" if config.model.revision else ""
    base, name = shlex.quote(config.model.name_or_path), shlex.quote(config.run.name)
    return f"vllm serve {base}{at} --tokenizer {place} --enable-lora --lora-modules {name}={place}{ranks}"
