"""Loads the tokenizer of a model, or trains one on the rows."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import find_or_build
from toolkit.data.tokens.read_tokenizer import open_tokenizer, read_tokenizer
from toolkit.data.tokens.special_tokens import compile_special_tokens, learn_spaces, put_spaces
from toolkit.errors import UserError
from toolkit.private import VOCABULARY_TOO_SMALL

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MAX_TRAINING_ROWS = 10_000
MAX_TRAINING_CHARACTERS = 400
MAX_ROWS_DECODED = 100
_WHITE = {"line breaks": "\n", "tabs": "\t", "runs of spaces": "  "}


def load_tokenizer(config: ModelConfig, vocab_size: float = math.inf) -> PreTrainedTokenizerBase:
    """The model's own tokenizer with `model.add_tokens`. If it has no padding token, as with most LLMs, its end token pads.

    That is safe: the labels that count are stored separately and never derived from the token ids.

    Args:
        vocab_size: token embeddings of the model.

    Raises:
        UserError: the tokenizer cannot be read, has neither a padding nor an end token, has more tokens than the model has
            embeddings, or has a vocabulary for targets that it does not encode with (FSMT's); a new token is
            empty, named twice, or an ordinary token of the tokenizer.
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


def describe_lost_text(tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[str]], what: str = "rows") -> list[str]:
    """Sentences if decoding the tokens of texts does not return the texts, else none.

    T5's tokenizers lose line breaks and runs of spaces, BERT's also lose case, others lose unknown characters. A space before the
    first word does not count, because many tokenizers add or drop it. `rows` are the texts of each row, `what` their name.
    """
    sentences, lost = [], []
    tried = rows[:MAX_ROWS_DECODED] if what != "sources" else []
    every = [text for texts in tried for text in texts]
    kept = learn_spaces(tokenizer, {token for text in every for token in compile_special_tokens(tokenizer).findall(text)}, every)
    for kind, white in _WHITE.items():
        ids = tokenizer(f"a{white}a", add_special_tokens=False)["input_ids"]
        num = 0 if white in str(tokenizer.decode(ids)) else sum(any(white in text.strip() for text in texts) for texts in rows)
        if num:
            level, share = "" if what == "sources" else "WARNING: ", f"{num} of {len(rows)} training {what} looked at"
            trouble = f"loses {kind}, which stand in {share} ({100 * num / len(rows):.1f} %)"
            remedy = f"with pretrained weights, model.add_tokens {json.dumps([white])} keeps them"
            remedy = remedy if white.strip(" ") else "no setting keeps them; tokenizers of bytes do, as ByT5's"
            sentences.append(f"{level}the tokenizer {tokenizer.name_or_path} {trouble}: {remedy}")
    for texts in tried:
        context = [text[:MAX_TRAINING_CHARACTERS] for text in texts]
        for text, ids in zip(context, tokenizer(context, add_special_tokens=False)["input_ids"], strict=True):
            decoded = put_spaces(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), kept)
            pair = (text.split(), decoded.split()) if sentences else (text.lstrip(" "), decoded.lstrip(" "))
            is_counted = what == "targets" and tokenizer.unk_token_id in ids  # by `describe_unknown`
            if pair[0] != pair[1] and not is_counted:
                lost.append(f"{text!r:.60} as {decoded!r:.60}")
                break
    trouble = f"{tokenizer.name_or_path} does not give back {len(lost)} of the first {len(tried)} training {what} as they are"
    return sentences + ([f"the tokenizer {trouble} ({lost[0]}): what it drops is never learned"] if lost else [])


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything that decides how text becomes token ids, independent of the files' location."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    extra = json.dumps([type(tokenizer).__name__, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256((body + extra).encode()).hexdigest()
