"""A tiny fast tokenizer of every kind that causal models come with, trained on a few lines, and random texts to try them on."""

import functools
import json
import random
from collections.abc import Sequence

CORPUS = [
    "so: it is  what\nthe\n\nword is",
    "  the word, the\n\n\nother:\n what\tis 12 34",
    "it is\r\n the end.\n  so it is: ",
] * 9
PARTS = (
    *("the", "word", "it is", "so", "what", "a", "Z", "12", "7", ".", ",", ":", "!?"),
    *(" ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", " \n", "\n ", "\r\n", "\u00a0", "\u2028"),
    *("é", "e\u0301", "ß", "日本", "語", "🎉", "👩‍👩‍👧", "ﬁ", "Ġ", "<s>"),  # a "▁" is a space to some: their own loss
)


def draw_text(draw: random.Random) -> str:
    """A few parts with at least one character that is not white space."""
    while not (text := "".join(draw.choices(PARTS, k=draw.randint(1, 7)))).strip():
        pass
    return text


def build_byte_level(*, add_prefix_space: bool = False, trim_offsets: bool = False, split: str | None = None):
    """GPT-2's, or with `split`, a regular expression, as Llama 3's and Qwen's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=split is None)
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


def build_metaspace(scheme: str, *, split: bool = False, unigram: bool = False, corpus: Sequence[str] = CORPUS):
    """As SentencePiece makes them: Llama 2's and Mistral's ("normalizer"), Gemma's ("never"); line breaks share a token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", fuse_unk=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    special_tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    options = {"vocab_size": 360, "special_tokens": special_tokens, "show_progress": False}
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **options) if unigram else trainers.BpeTrainer(**options)
    tokenizer.train_from_iterator(corpus, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["model"]["byte_fallback"] = True
    trained["added_tokens"] = trained["added_tokens"][:3]  # bytes are not special tokens
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts if scheme == "never" else [*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(tokenizer)


def build_word_piece():
    """BERT's: white space, case and accents are lost, and so are characters that it does not know."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "".join(PARTS)], trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer):
    from transformers import PreTrainedTokenizerFast

    unknown = {"unk_token": "<unk>"} if tokenizer.token_to_id("<unk>") is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", **unknown)


LLAMA_3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXACT_KINDS = {
    "byte_level": build_byte_level,
    "byte_level_space": functools.partial(build_byte_level, add_prefix_space=True),
    "byte_level_trimmed": functools.partial(build_byte_level, trim_offsets=True),
    "byte_level_llama_3": functools.partial(build_byte_level, split=LLAMA_3),
    "metaspace_normalizer": functools.partial(build_metaspace, "normalizer"),
    **{f"metaspace_{scheme}": functools.partial(build_metaspace, scheme) for scheme in ("always", "first", "never")},
    "metaspace_words": functools.partial(build_metaspace, "always", split=True),
    "unigram": functools.partial(build_metaspace, "first", unigram=True, split=True),
    "unigram_whole": functools.partial(build_metaspace, "always", unigram=True),
}
