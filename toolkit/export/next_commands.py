"""The commands that follow an export: to use, convert, serve, score and share this model, as far as each tool takes it.

vLLM has no T5 and no encoder-decoder of text, and takes neither DoRA nor modules or token rows that an adapter trains fully.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from toolkit.config.load import RecipeConfig
from toolkit.export.card import Origin, is_hub_id
from toolkit.export.places import Places
from toolkit.export.usage import write_python

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""What its `--max-lora-rank` takes, from the default."""


def list_commands(
    config: RecipeConfig, skeleton: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, origin: Origin, places: Places
) -> list[str]:
    """A line for each tool that takes the exported model, or the adapter if that is all there is, and Python to use it."""
    folder = places.model or places.adapter
    assert folder is not None
    is_adapter, place = places.model is None, shlex.quote(str(folder))
    plain = " --plain" if tokenizer.chat_template and origin.data is not None and not origin.data.has_chats else ""
    python = write_python(config, tokenizer, str(folder), origin.computed_in, origin.data, is_adapter=is_adapter)
    use = f"use it: python -m toolkit generate {place} --file FILE.csv --output OUT.jsonl{plain}"
    lines = [use, "use it in Python:", *python.splitlines()]
    base, revision = shlex.quote(config.model.name_or_path), config.model.revision
    if not skeleton.config.is_encoder_decoder:
        if serve := _serve(config, skeleton, place, is_adapter=is_adapter):
            lines.append(f"serve it: {serve}")
        pretrained = f"{base},peft={place},tokenizer={place}" if is_adapter else place
        at = f",revision={revision}" if is_adapter and revision else ""
        lines.append(f"score it: lm_eval --model hf --model_args pretrained={pretrained}{at} --tasks TASK")
    elif skeleton.config.model_type in ("t5", "mt5", "umt5") and not is_adapter:  # whose texts are the same in CTranslate2 4.8
        lines.append(f"convert it: ct2-transformers-converter --model {place} --output_dir {shlex.quote(f'{folder}-ct2')}")
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
    if lora.use_dora or lora.modules_to_save or lora.trainable_token_indices or rank > _VLLM_RANKS[-1]:
        return None
    needed = min(allowed for allowed in _VLLM_RANKS if allowed >= rank)
    ranks = f" --max-lora-rank {needed}" if needed > _VLLM_RANKS[0] else ""
    at = f" --revision {config.model.revision}" if config.model.revision else ""
    base, name = shlex.quote(config.model.name_or_path), shlex.quote(config.run.name)
    return f"vllm serve {base}{at} --tokenizer {place} --enable-lora --lora-modules {name}={place}{ranks}"
