"""Tokens of marked places: none reaches over the start of one, and no character is lost."""

from __future__ import annotations

import random

import pytest

from tests.support.chats import SPACE_ADDING, build_chat_tokenizer, build_space_adding_tokenizer
from tests.support.model_folders import _build_tokenizer
from tests.support.tokenizer_kinds import LLAMA_3, build_byte_level, draw_text
from toolkit.data.tokens import offsets as spans
from toolkit.data.tokens.offsets import tokenize_texts


def as_lists(tokens):
    return [column.tolist() for column in tokens[:3]]


@pytest.fixture(scope="module")
def byte_level():
    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer

    return train_byte_level_tokenizer(["yes yes yes no no no"] * 9, 300)


def test_a_place_between_tokens_changes_nothing(byte_level):
    import copy

    from tokenizers import processors

    texts = ["yes no yes", "no", "yes no", "é€no"]
    plain = tokenize_texts(byte_level, texts, [[]] * 4)
    marked = tokenize_texts(byte_level, texts, [[3, 6], [0, 2], [3], [2]])
    assert [as_lists(tokens) for tokens in marked] == [as_lists(tokens) for tokens in plain]
    assert [tokens.firsts for tokens in marked] == [(1, 2), (0, 1), (1,), (5,)]
    # A character of several tokens is whole.
    assert list(zip(plain[3].starts, plain[3].ends, strict=True)) == [(0, 1)] * 2 + [(1, 2)] * 3 + [(2, 4)]
    assert tokenize_texts(byte_level, [], []) == []
    trimming = copy.deepcopy(byte_level)  # its tokens leave out their space
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trimming("yes no", return_offsets_mapping=True)["offset_mapping"] == [(0, 3), (4, 6)]
    trimmed, whole = (tokenize_texts(tokenizer, texts[:1], [[4]])[0] for tokenizer in (trimming, byte_level))
    assert as_lists(trimmed) == as_lists(whole)


@pytest.mark.parametrize("way", SPACE_ADDING)
def test_a_long_text_is_tokenized_in_blocks_as_it_is_whole(byte_level, monkeypatch, way):
    texts = ["so it is\n  it\n\nis so " * 40, "so it is " * 40, "so\n", "é€" * 90]
    for tokenizer in (byte_level, build_space_adding_tokenizer(way)):
        whole = tokenize_texts(tokenizer, texts, [[]] * len(texts))
        with monkeypatch.context() as patched:
            patched.setattr(spans, "_BLOCK_CHARACTERS", 64)
            patched.setattr(spans, "_MOST_CHARACTERS_AT_ONCE", 200)
            blocks = tokenize_texts(tokenizer, texts, [[]] * len(texts))
        assert [as_lists(tokens) for tokens in blocks] == [as_lists(tokens) for tokens in whole]


def test_special_tokens_are_those_in_the_text_only():
    tokenizer = _build_tokenizer(("<s>", "<pad>", "</s>"))
    assert tokenizer("alpha")["input_ids"][::2] == [0, 2]
    (tokens,) = tokenize_texts(tokenizer, ["alpha beta</s>"], [[6]])
    assert tokenizer.convert_ids_to_tokens(tokens.input_ids) == ["▁alpha", "▁", "beta", "</s>"]
    chat = build_chat_tokenizer("<|im_end|>")
    (tokens,) = tokenize_texts(chat, ["<|im_end|>a"], [[]])
    assert tokens.starts.tolist() == [0, 10]


@pytest.mark.parametrize(
    ("split", "is_composing", "word", "keeps_words"),
    [
        (None, False, None, True),
        (LLAMA_3, False, None, True),
        (LLAMA_3, True, None, True),
        (LLAMA_3, False, "wo", False),  # a token that is one only where a word ends
        (r"\p{L}+(?=\s)|\p{L}|\s+(?!\S)|\s+", False, None, False),
        (r"\p{L}+|\s+(?!\S)", False, None, False),
    ],
)
def test_a_prompt_is_not_tokenized_only_where_that_changes_nothing(monkeypatch, split, is_composing, word, keeps_words):
    from tokenizers import AddedToken, normalizers

    tokenizer = build_byte_level(split=split)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC() if is_composing else None
    tokenizer.add_tokens([AddedToken(word, single_word=True)] if word else ["<|x|>"])
    draw = random.Random(0)
    parts = [[draw_text(draw) for _ in range(3)] for _ in range(500)] + [["so ", "it", "wo"], ["it wo", "rd", "<|x|>"]]
    texts = ["".join(three) for three in parts]
    places = [[len(first), len(first + second)] for first, second, _ in parts]
    encoded, encode = [], spans._encode
    monkeypatch.setattr(spans, "_encode", lambda encoder, texts, *rest: encoded.extend(texts) or encode(encoder, texts, *rest))
    fast = tokenize_texts(tokenizer, texts, places)
    num_fast = len(encoded)
    monkeypatch.setattr(spans, "_keeps_words", lambda _: False)
    spans._build_encoders.cache_clear()
    slow = tokenize_texts(tokenizer, texts, places)
    assert [(as_lists(tokens), tokens.firsts) for tokens in fast] == [(as_lists(tokens), tokens.firsts) for tokens in slow]
    assert (num_fast < len(encoded) - num_fast - 50) == keeps_words
