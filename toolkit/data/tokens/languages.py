"""The languages of a translation model: the tokens that mark sources and targets, and the start of generated texts.

The tokenizers of M2M-100, NLLB, mBART and PLBart add a language token before or after a text. Its position is found by encoding
a text, not by the model's name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("toolkit")

NUM_LANGUAGES_SHOWN = 6


def marks_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a language for sources (`src_lang`) and one for targets (`tgt_lang`)."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def set_languages(tokenizer: PreTrainedTokenizerBase, name: str, source: str | None, target: str | None) -> None:
    """Make the tokenizer mark sources and targets with these languages; None keeps the tokenizer's saved language. A tokenizer
    that marks no languages, lacks this one, or has none set, is a `UserError`. `name` is the model's, for errors."""
    wanted = {"source": source, "target": target}
    if not marks_languages(tokenizer):
        for side, language in wanted.items():
            if language is not None:
                raise UserError(
                    f"data.{side}_language is {language}, but the tokenizer of {name} does not mark languages: leave it out"
                )
        return
    for side, attribute, argument in (("source", "src_lang", "text"), ("target", "tgt_lang", "text_target")):
        language = getattr(tokenizer, attribute) if wanted[side] is None else wanted[side]
        if language is None:
            raise UserError(
                f"the tokenizer of {name} marks each text with its language: set data.{side}_language to one of "
                f"{_languages(tokenizer)}"
            )
        try:
            setattr(tokenizer, attribute, language)
            marks = tokenizer(**{argument: ""})["input_ids"]
        except KeyError:
            marks = [tokenizer.unk_token_id]
        # The mark must be a language: NLLB's `fr` is a piece of words, its French is `fra_Latn`.
        languages = set(_language_ids(tokenizer).values())
        if not languages.intersection(marks) or not {*tokenizer.all_special_ids, *languages}.issuperset(marks):
            raise UserError(
                f"data.{side}_language {language!r} is not a language of the tokenizer of {name}: it has {_languages(tokenizer)}"
            )


def start_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, collator: Any) -> None:
    """Set the generation config so that `generate`, also after an export, begins as the decoder inputs in training do.

    The first decoder input is the start token: the target's language for mBART, `</s>` for NLLB. If targets begin with a
    language, as NLLB's do, it is forced as the first generated token.
    """
    labels = tokenizer(text_target="a")["input_ids"]
    start = int(collator.decoder_inputs(torch.tensor([labels]))[0, 0])
    generation: Any = model.generation_config
    used = generation.decoder_start_token_id
    settings: dict[str, int | None] = {}
    if start != (generation.bos_token_id if used is None else used):
        settings["decoder_start_token_id"] = start
    if marks_languages(tokenizer):
        plain = tokenizer(text_target="a", add_special_tokens=False)["input_ids"]
        forced = labels[0] if labels[: len(plain)] != plain else None
        if forced != generation.forced_bos_token_id:
            settings["forced_bos_token_id"] = forced
    for setting, token_id in settings.items():
        setattr(generation, setting, token_id)
        token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
        logger.info(f"{setting} of the generation config is set to {token_id} ({token}), as in training")


def _language_ids(tokenizer: Any) -> dict[str, int]:
    """Token id of each language. Without a table of languages: of each special token that has no other role."""
    if table := getattr(tokenizer, "lang_code_to_id", None):
        return table
    named = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    return {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens if token not in named}


def _languages(tokenizer: Any) -> str:
    """The first few languages, for errors."""
    codes = _language_ids(tokenizer)
    shown = ", ".join(sorted(codes)[:NUM_LANGUAGES_SHOWN])
    return f"{shown}, … ({len(codes)} in all)" if len(codes) > NUM_LANGUAGES_SHOWN else shown
