"""A prompt's tokens are those that inference makes of it, whatever follows; no character is lost or added at a marked place."""

import copy
import random
import re

import pytest
from tokenizers import AddedToken, normalizers, processors

from tests.support.chats import CHATML, SPACE_ADDING, build_chat_tokenizer, build_space_adding_tokenizer
from tests.support.model_folders import _build_tokenizer
from tests.support.tokenizer_kinds import EXACT_KINDS, LLAMA_3, build_byte_level, build_word_piece, draw_text
from toolkit.data.tokens import offsets as spans
from toolkit.data.tokens.offsets import tokenize_texts
from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer

NUM_PAIRS = 200


def draw_pairs():
    draw = random.Random(0)
    fixed = [("so: ", "it is"), ("so:\n", "\nit is"), ("so:  ", "\nit"), ("so:", "\n\n\nit"), ("so\n\n", "\n it"), ("a  ", "b")]
    return [*fixed, *((draw_text(draw), draw_text(draw)) for _ in range(NUM_PAIRS))]


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_prompts_are_tokenized_as_at_inference_and_nothing_is_lost(prepare, kind):
    tokenizer = EXACT_KINDS[kind]()
    pairs = draw_pairs()
    rows = prepare(tokenizer, [{"prompt": prompt, "completion": completion} for prompt, completion in pairs])
    num_straddled = 0
    for (prompt, completion), row in zip(pairs, rows.train, strict=True):
        where = repr((prompt, completion))
        *ids, end = row["input_ids"]
        first = row["prompt_length"]
        assert ids[:first] == tokenizer(prompt)["input_ids"], where
        joint = tokenizer(prompt + completion, return_offsets_mapping=True)
        # Some put a space before a text, or leave one out there: that is the same for the text as a whole.
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert decoded == tokenizer.decode(joint["input_ids"], clean_up_tokenization_spaces=False), where
        assert decoded.removeprefix("<s>").lstrip(" ") == (prompt + completion).lstrip(" ") or "<s>" in prompt + completion, where
        straddles = any(start < len(prompt) < stop for start, stop in joint["offset_mapping"])
        if not straddles and "trimmed" not in kind:
            behind = sum(stop <= len(prompt) and start < len(prompt) for start, stop in joint["offset_mapping"])
            assert ids[first:] == joint["input_ids"][behind:], where
        num_straddled += straddles
        assert row["labels"] == [-100] * first + ids[first:] + [end]
    assert num_straddled > 5 or "trimmed" in kind  # offsets that leave spaces out show fewer


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_the_last_prompt_of_a_chat_is_what_its_template_gives_inference(prepare, kind):
    tokenizer = EXACT_KINDS[kind]()
    tokenizer.chat_template = CHATML
    draw = random.Random(1)
    for added in (["<|im_start|>", "<|im_end|>"], []):  # without them they are text, as to a base model
        tokenizer.add_special_tokens({"additional_special_tokens": added})
        roles = ("user", "assistant", "user", "assistant")
        chats = [[{"role": role, "content": draw_text(draw)} for role in roles[:n]] for n in (2, 4) for _ in range(30)]
        rows = prepare(tokenizer, [{"messages": messages} for messages in chats])
        for messages, row in zip(chats, rows.train, strict=True):
            assert tokenizer.convert_tokens_to_ids("<s>") not in row["input_ids"]
            if any("<s>" in message["content"] for message in messages):  # there it is text, unlike to plain transformers
                continue
            decoded = tokenizer.decode(row["input_ids"], clean_up_tokenization_spaces=False)
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert decoded == tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(messages) == 2:
                given = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
                assert row["input_ids"][: row["prompt_length"]] == given


def test_a_tokenizer_that_does_not_keep_its_text_is_said_with_an_example(prepare):
    rows = prepare(build_word_piece(), [{"prompt": "So  the ", "completion": "word\nis"}, {"prompt": "so", "completion": "word"}])
    tokenizer = rows.tokenizer
    for row, prompt in zip(rows.train, ("So  the ", "so"), strict=True):
        assert row["input_ids"][: row["prompt_length"]] == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(rows.train[0]["input_ids"]) == "so the word is </s>"
    of_breaks, of_runs, of_case = (re.sub(r"/\S+/model", "BERT", remark) for remark in rows.remarks)
    assert of_breaks == (
        "WARNING: the tokenizer BERT loses line breaks, which stand in 1 of 2 training rows looked at (50.0 %): with pretrained "
        'weights, model.add_tokens ["\\n"] keeps them'
    )
    assert of_runs.startswith("WARNING: the tokenizer BERT loses runs of spaces, which stand in 1 of 2 training rows")
    assert of_runs.endswith(": no setting keeps them; tokenizers of bytes do, as ByT5's")
    assert "does not give back 1 of the first 2 training rows as they are ('So  the ' as 'so the')" in of_case
    assert prepare(build_byte_level(), [{"prompt": "So  the ", "completion": "word\nis"}]).remarks == []


def as_lists(tokens):
    return [column.tolist() for column in tokens[:3]]


@pytest.fixture(scope="module")
def byte_level():
    return train_byte_level_tokenizer(["yes yes yes no no no"] * 9, 300)


def test_a_place_between_tokens_changes_nothing(byte_level):
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
