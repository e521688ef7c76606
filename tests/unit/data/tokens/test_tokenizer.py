"""Tokenizers: trained ones, and what is asked of a model's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refusal
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.tokenizer import hash_tokenizer, load_tokenizer, train_byte_level_tokenizer
from toolkit.errors import UserError

TEXTS = [f'def take_oar_{i}(self):\n    """Return the oar."""\n    return self.oars[{i}]\n' for i in range(50)]


def write_tokenizer(folder: Path, **special_tokens: str) -> ModelConfig:
    vocab = {"<pad>": 0, "</s>": 1, "oar": 2}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "decoder": None,
        "post_processor": None, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "unk_token": "oar", "vocab": vocab},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}))
    return ModelConfig(name_or_path=str(folder))


def test_byte_level_tokenizer_writes_every_text_and_is_the_same_each_time(tmp_path: Path) -> None:
    tokenizer, again = (train_byte_level_tokenizer(iter(TEXTS), vocab_size=300) for _ in range(2))
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 1)
    for text in (TEXTS[3], "  Ruder – 櫂 🚣\r\n\t\x00", ""):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert not {0, 1} & set(ids)
    assert tokenizer("<|endoftext|>")["input_ids"] == [1]
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)), vocab_size=300)
    assert hash_tokenizer(tokenizer) == hash_tokenizer(again) == hash_tokenizer(loaded)
    assert hash_tokenizer(tokenizer) != hash_tokenizer(train_byte_level_tokenizer(TEXTS, vocab_size=299))


def test_without_a_padding_token_the_end_token_pads(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, eos_token="</s>"), vocab_size=3)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_new_tokens_are_special_and_those_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    config = replace(write_tokenizer(tmp_path, eos_token="</s>"), add_tokens=["<|im_start|>", "</s>", "<|im_end|>"])
    tokenizer = load_tokenizer(config)
    assert tokenizer.convert_tokens_to_ids(config.add_tokens) == [3, 1, 4]
    ids = tokenizer("<|im_start|>oar<|im_end|>")["input_ids"]
    assert ids == [3, 2, 4] and tokenizer.decode(ids, skip_special_tokens=True) == "oar"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(ModelConfig(name_or_path=str(tmp_path / "saved"), add_tokens=config.add_tokens), vocab_size=5)
    assert hash_tokenizer(again) == hash_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("end", "added", "vocab_size", "sentence"),
    [
        (
            None,
            [],
            3,
            "the tokenizer of {} has neither a padding nor an end token: set pad_token or eos_token in its tokenizer_config",
        ),
        (
            "</s>",
            [],
            2,
            "the tokenizer of {} has 3 tokens, but the model only 2 embeddings: take the tokenizer that belongs to the ",
        ),
        ("</s>", ["<|a|>", " "], None, "model.add_tokens[1] is ' ', which is empty: give a text, as <|im_start|>"),
        ("</s>", ["<|a|>", "<|a|>"], None, "model.add_tokens[1] is '<|a|>', for the second time: name each token once"),
        (
            "</s>",
            ["oar"],
            None,
            "model.add_tokens[0] is 'oar', an ordinary token of the tokenizer, which it would cut out of words",
        ),
    ],
)
def test_tokenizers_and_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, end: str | None, added: list[str], vocab_size: int | None, sentence: str
) -> None:
    config = replace(write_tokenizer(tmp_path, **{"eos_token": end} if end else {}), add_tokens=added)
    assert refusal(load_tokenizer, config, vocab_size=vocab_size).startswith(sentence.format(tmp_path))


@pytest.mark.parametrize("target_vocabulary", [{0: "<pad>", 1: "</s>", 2: "oar"}, {0: "<pad>", 1: "</s>", 2: "rame"}])
def test_targets_with_a_vocabulary_of_their_own_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_vocabulary: dict[int, str]
) -> None:
    """As of FSMT's tokenizer, whose package is not here."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, pad_token="<pad>").name_or_path)
    tokenizer.get_src_vocab = tokenizer.get_vocab
    tokenizer.convert_ids_to_tokens = target_vocabulary.__getitem__
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **options: tokenizer)
    if target_vocabulary[2] == "oar":
        assert load_tokenizer(ModelConfig(name_or_path="tiny"), vocab_size=3) is tokenizer
    else:
        with pytest.raises(UserError, match="the tokenizer of tiny decodes targets with a vocabulary of their own"):
            load_tokenizer(ModelConfig(name_or_path="tiny"), vocab_size=3)
