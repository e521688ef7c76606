"""Reads the tokenizer that belongs to a model as its owner wrote it: transformers would make up an empty one where it finds no
vocabulary, and version 5 replaces parts of some `tokenizer.json` by those of the class that is named beside it."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.languages import marks_languages
from toolkit.errors import UserError
from toolkit.files.durable import refuse_pointers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_say = functools.cache(logging.getLogger("toolkit").info)  # once, where a run reads a tokenizer several times
_OF_TOKENIZERS = re.compile(r"token|vocab|merges|spiece|sentencepiece|tekken|chat_template|\.(model|spm|tiktoken|codes)$")
"""In the names of files that a tokenizer reads."""
_OF_MODEL = ("unk_token", "unk_id", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix")
"""What a tokenizer's model has beside its vocabulary."""
_OVERRULING = {"add_prefix_space": "add_prefix_space|prepend_scheme", "do_lower_case": "lowercase",
               "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"}  # fmt: skip
"""Settings of a `tokenizer_config.json` that overrule keys of the `tokenizer.json`, in version 4 of transformers too."""


def trains_tokenizer(config: ModelConfig) -> bool:
    """Whether a tokenizer is to be trained on the rows: it is asked for, or the run starts from scratch in a folder without."""
    is_new = config.from_scratch and not config.init_from and not config.tokenizer
    return config.train_tokenizer or (is_new and Path(config.name_or_path).is_dir() and not _list_files(config.name_or_path))


def read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """`open_tokenizer` of `model.tokenizer`, else of the model or, if its folder has none, of `model.init_from`."""
    name, revision = config.tokenizer or config.name_or_path, None if config.tokenizer else config.revision
    if config.init_from and not config.tokenizer and Path(name).is_dir() and not _list_files(name):
        start = Path(config.init_from)
        for place in filter(_list_files, (start, start / "tokenizer", start / "../../tokenizer")):
            _say(f"the tokenizer is that of {place}: model.name_or_path {name} has none")
            return open_tokenizer(place, None, config.trust_remote_code)
    return open_tokenizer(name, revision, config.trust_remote_code)


def open_tokenizer(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id by `AutoTokenizer`, with the parts of its `tokenizer.json`; a `UserError`, with the
    folder's files, if it cannot be read, no vocabulary is there to read, or a file is a git-lfs pointer."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    files = _list_files(name)
    refuse_pointers(Path(name) / file for file in files if "tokenizer.json" not in files or file.endswith((".json", ".jinja")))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)
        made_up: dict[str, int] = {}
        with suppress(Exception):  # a class that needs its files has read them; ByT5's has none, its tokens are bytes
            made_up = type(tokenizer)().get_vocab() if tokenizer.vocab_files_names else {}
        is_read = getattr(tokenizer, "vocab_size", 1) and (
            not made_up or not tokenizer.get_vocab().keys() <= {*made_up, *tokenizer.get_added_vocab()}
        )
        reason = "" if is_read else f"{type(tokenizer).__name__} finds no vocabulary"
    except Exception as error:  # a damaged file lets libraries raise anything
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__).rstrip(".:")
    if reason:
        there = f"; its files are {', '.join(sorted(os.listdir(name))[:12])}" if Path(name).is_dir() else ""
        raise UserError(
            f"the tokenizer of {name} could not be read ({reason}){there}: put the tokenizer that belongs to the weights there, "
            "or name a folder or hub id that has it in model.tokenizer"
        )
    quiet: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    file = cached_file(str(name), "tokenizer.json", revision=revision, local_files_only=True, **quiet)  # it has been downloaded
    return _with_own_parts(tokenizer, Path(file), revision) if file else tokenizer


def differing_parts(one: Any, other: Any, settings: dict[str, Any] | None = None) -> list[str]:
    """The parts in which two tokenizers of the `tokenizers` library differ with an effect on tokens, and not because of these
    settings of a `tokenizer_config.json`."""
    given = [keys for name, keys in _OVERRULING.items() if (settings or {}).get(name) is not None]

    def describe(part: str, found: Any) -> Any:
        if part == "model":
            return type(found).__name__, [getattr(found, key, None) or None for key in _OF_MODEL]
        text = re.sub(rf'"({"|".join(["trim_offsets", *given])})":[^,}}]*,?', "", found.__getstate__().decode()) if found else ""
        if part in ("decoder", "post_processor"):  # where a byte-level one has no settings, and adds nothing
            text = re.sub(r'\{"type":"ByteLevel"[^}]*\}', "bytes" if part == "decoder" else "", text)
        return "" if '"special_tokens":{}' in text else text

    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    return [part for part in parts if describe(part, getattr(one, part)) != describe(part, getattr(other, part))]


def _list_files(name: str | Path) -> list[str]:
    """Names of the files of a folder that a tokenizer may read; none for a hub id."""
    files = [file.name for file in Path(name).iterdir() if file.is_file()] if Path(name).is_dir() else []
    return list(filter(_OF_TOKENIZERS.search, files))


def _with_own_parts(tokenizer: Any, file: Path, revision: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer itself, if it has the parts of its `tokenizer.json`; else one that has them."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    its_class, beside = type(tokenizer), file.with_name("tokenizer_config.json")
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not its_class.__module__.startswith("transformers.models."):
        return tokenizer
    stored = Tokenizer.from_file(str(file))
    replaced = differing_parts(stored, tokenizer.backend_tokenizer, json.loads(beside.read_bytes()) if beside.is_file() else {})
    if has_languages := marks_languages(tokenizer):  # on which its post-processor depends
        replaced = [part for part in replaced if part != "post_processor"]
    if replaced:
        theirs = f"{', '.join(replaced)} of the tokenizer.json of {tokenizer.name_or_path} by those of {its_class.__name__}"
        _say(f"transformers 5 would replace {theirs}: the file's own are used, and exported")
    if replaced and not has_languages:  # the class's own defaults hold where the file knows the token
        kept: dict[str, Any] = {
            role: token for role, token in tokenizer.special_tokens_map.items() if stored.token_to_id(str(token)) is not None
        }
        kept |= {"model_input_names": tokenizer.model_input_names, "padding_side": tokenizer.padding_side}
        return PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path, revision=revision or "main", **kept)
    for part in replaced:  # only its class knows languages
        setattr(tokenizer.backend_tokenizer, part, getattr(stored, part))
    return tokenizer
