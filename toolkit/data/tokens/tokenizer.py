"""Loads the tokenizer that belongs to a model, or trains one on the rows.

A tokenizer is read as its owner wrote it: transformers would make up an empty one where it finds no vocabulary, and version 5
replaces parts of some `tokenizer.json` by those of the class that is named beside it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import find_or_build
from toolkit.errors import UserError
from toolkit.files.durable import refuse_pointers
from toolkit.private import VOCABULARY_TOO_SMALL

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MAX_TRAINING_ROWS = 10_000
MAX_TRAINING_CHARACTERS = 400
_say = functools.cache(logging.getLogger("toolkit").info)  # once, where a run reads a tokenizer several times
_OF_TOKENIZERS = re.compile(r"token|vocab|merges|spiece|sentencepiece|tekken|chat_template|\.(model|spm|tiktoken|codes)$")
"""In the names of files that a tokenizer reads."""
_OF_MODEL = ("unk_token", "unk_id", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix")
"""What a tokenizer's model has beside its vocabulary."""
_OVERRULING = {"add_prefix_space": "add_prefix_space|prepend_scheme", "do_lower_case": "lowercase",
               "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"}  # fmt: skip
"""Settings of a `tokenizer_config.json` that overrule keys of the `tokenizer.json`, in version 4 of transformers too."""


def load_tokenizer(config: ModelConfig, vocab_size: float = math.inf) -> PreTrainedTokenizerBase:
    """The model's own tokenizer with `model.add_tokens`. If it has no padding token, as with most LLMs, its end token pads.

    That is safe: the labels that count are stored separately and never derived from the token ids.
    A tokenizer that cannot be read, has neither a padding nor an end token, more tokens than the model's `vocab_size` embeddings,
    or a vocabulary for targets that it does not encode with (FSMT's), is a `UserError`; so is a new token that is empty, named
    twice, or an ordinary token of the tokenizer.
    """
    tokenizer, name = read_tokenizer(config), config.tokenizer or config.name_or_path
    has_two = hasattr(tokenizer, "get_src_vocab")  # FSMT's: it decodes with the targets' vocabulary
    if has_two and any(tokenizer.convert_ids_to_tokens(place) != token for token, place in tokenizer.get_src_vocab().items()):
        raise UserError(
            f"the tokenizer of {name} decodes targets with a vocabulary of their own, but encodes them with that "
            "of the sources, so their labels would be wrong: take a model with one vocabulary, such as Marian or M2M-100"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {name} has neither a padding nor an end token: set pad_token or eos_token "
                "in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokens, known = config.add_tokens or [], tokenizer.get_vocab()
    for place, token in enumerate(tokens):
        is_ordinary = token in known and known[token] not in tokenizer.added_tokens_decoder
        reasons = {
            "which is empty: give a text, as <|im_start|>": not token.strip(" "),
            "for the second time: name each token once": token in tokens[:place],
            "an ordinary token of the tokenizer, which it would cut out of words: give another": is_ordinary,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise UserError(f"model.add_tokens[{place}] is {token!r}, {reason}")
    tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)  # those known stay as they are
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens, but the model only {vocab_size} embeddings: "
            "take the tokenizer that belongs to the model, or name the tokens that are new in model.add_tokens, whose rows train"
        )
    return tokenizer


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


def marks_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a language for sources (`src_lang`) and one for targets (`tgt_lang`)."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def keep_trained_tokenizer(cache: Path, trained_on: str, train: Callable[[], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The tokenizer that `train` makes, or made for an earlier run: trained again on the same rows, it would differ.

    It has a folder of its own in `cache`, so that tokens that are damaged are built again as they were. `trained_on` is
    everything that decides it. A cache that cannot be written or read is a `UserError`.
    """
    folder = cache / f"tokenizer-{hashlib.sha256(trained_on.encode()).hexdigest()}"

    def build(unfinished: Path) -> dict[str, Any]:
        train().save_pretrained(unfinished / "tokenizer")
        return {"trained_on": trained_on}

    find_or_build("the trained tokenizer", folder, build)
    return open_tokenizer(folder / "tokenizer")


def train_tokenizer(rows: Dataset, vocab_size: int, prefix: str = "") -> PreTrainedTokenizerBase:
    """Train a unigram tokenizer like T5's (`<pad>` 0, `</s>` 1, `<unk>` 2) with the tokenizers library. Rows with more different
    characters than `vocab_size` allows are a `UserError`.

    It is trained on `prefix` and the columns `prompt` and `completion` of at most `MAX_TRAINING_ROWS` evenly spaced rows, each
    cut to `MAX_TRAINING_CHARACTERS`: more text makes training slower, but a small vocabulary no better.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    every = -(-len(rows) // MAX_TRAINING_ROWS)
    chosen = rows.select(range(0, len(rows), every))
    of_rows = (text[:MAX_TRAINING_CHARACTERS] for row in chosen for text in (row["prompt"], row["completion"]))
    texts = itertools.chain([prefix] if prefix else [], of_rows)  # once is enough for its characters
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    # A word has the same pieces beside any punctuation (SentencePiece mixes no scripts either): a model can learn to copy it.
    of_punctuation = pre_tokenizers.Split(Regex(r"[^\w▁]|[_\d]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), of_punctuation])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:
        if VOCABULARY_TOO_SMALL not in str(error):
            raise
        raise UserError(
            f"the model has {vocab_size} token embeddings, fewer than the rows have different characters: raise vocab_size in "
            "its config.json, or give it a tokenizer"
        ) from None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def train_byte_level_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer like GPT-2's (`<pad>` 0, `<|endoftext|>` 1, which begins and ends a text). A `vocab_size`
    that is too small for the 256 bytes and the special tokens is a `UserError`.

    It can encode every text, and the same texts in the same order give the same tokenizer. It adds no special tokens by itself.
    All texts are used and read once.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special_tokens = ["<pad>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_least = len(alphabet) + len(special_tokens)
    if vocab_size < num_least:
        raise UserError(
            f"the model has {vocab_size} token embeddings, fewer than the {num_least} that a byte-level tokenizer begins with: "
            "raise vocab_size in its config.json, or give it a tokenizer"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything that decides how text becomes token ids, independent of the files' location."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    extra = json.dumps([type(tokenizer).__name__, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256((body + extra).encode()).hexdigest()
