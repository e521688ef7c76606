"""Tokenizers of translation models, made offline: each marks a text's language in the way of its own family."""

import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

LANGUAGES: dict[str, tuple[str, str]] = {
    "m2m_100": ("en", "fr"),
    "nllb": ("eng_Latn", "fra_Latn"),
    "mbart": ("en_XX", "fr_XX"),
    "plbart": ("python", "en_XX"),
}
"""Source and target language, as each tokenizer names them."""


def save_translation_tokenizer(family: str, words: Iterable[str], folder: Path) -> None:
    """Write the tokenizer of a family into a folder, with fewer than 256 tokens. It has no target language yet."""
    with tempfile.TemporaryDirectory() as scratch:
        BUILDERS[family](list(words), Path(scratch)).save_pretrained(folder)


def _nllb(words: list[str], scratch: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import NllbTokenizer

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=200, special_tokens=specials, show_progress=False))
    trained = json.loads(tokenizer.to_str())["model"]
    languages = ["eng_Latn", "fra_Latn", "deu_Latn"]
    return NllbTokenizer(vocab=trained["vocab"], merges=list(map(tuple, trained["merges"])), additional_special_tokens=languages)


def _mbart(words: list[str], scratch: Path):
    from transformers import MBartTokenizer

    letters = sorted({letter for word in words for letter in word})
    pieces = [*((f"▁{word}", -2.0) for word in words), *((letter, -5.0) for letter in ["▁", *letters])]
    return MBartTokenizer(vocab=[("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces])


def _m2m_100(words: list[str], scratch: Path):
    import sentencepiece
    from transformers import M2M100Tokenizer
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    model = _train_sentencepiece(words, scratch / "trained.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, len(pieces)))]
    vocab_file = scratch / "trained.json"
    vocab_file.write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]  # as in the special_tokens_map.json of a real one
    return M2M100Tokenizer(vocab_file=str(vocab_file), spm_file=str(model), additional_special_tokens=languages)


def _plbart(words: list[str], scratch: Path):
    from transformers import PLBartTokenizer

    return PLBartTokenizer(vocab_file=str(_train_sentencepiece(words, scratch / "trained.spm")))


BUILDERS = {"nllb": _nllb, "mbart": _mbart, "m2m_100": _m2m_100, "plbart": _plbart}


def _train_sentencepiece(words: list[str], path: Path) -> Path:
    import sentencepiece

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 10), model_writer=content, model_type="bpe", vocab_size=80, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    path.write_bytes(content.getvalue())
    return path
