"""Text longer than a row is trained on whole, and a run says what a cut loses. A prompt's tokens are those that inference
makes of it, whatever follows; no character is lost or added at a marked place."""

import itertools
import random
import re

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from tests.support.chats import CHATML
from tests.support.refusals import refusal
from tests.support.tokenizer_kinds import EXACT_KINDS, LLAMA_3, build_byte_level, build_metaspace, build_word_piece, draw_text
from toolkit.config.data import DataConfig
from toolkit.data.tokens import offsets as spans
from toolkit.data.tokens.cuts import describe_cut
from toolkit.data.tokens.offsets import tokenize_texts

BOOK_CHARACTERS = 40_000
PIECE = 10**10


def write_book(number, num_characters=BOOK_CHARACTERS):
    draw = random.Random(number)
    words = ["the ", "word ", "so it is, ", "what\n", "\n\n", "other: ", "é", "日本", "🎉 ", f"{number} "]
    return "".join(draw.choices(words, k=num_characters))[:num_characters]


def assert_every_token_is_a_label(rows, text, tokenizer, row_id, num_prefix, limit):
    pieces = sorted((row for row in rows if row["row_id"] % PIECE == row_id), key=lambda row: row["row_id"])
    assert [row["row_id"] for row in pieces] == [row_id + number * PIECE for number in range(len(pieces))]
    expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert [label for row in pieces for label in row["labels"] if label != -100] == expected[1:]
    for number, row in enumerate(pieces):
        assert row["num_tokens"] == len(row["input_ids"]) == len(row["labels"]) <= limit
        assert (row["prompt_length"], row["target"]) == (0, ""), "nothing is generated"
        num_context = row["labels"].count(-100)
        assert row["labels"] == [-100] * num_context + row["input_ids"][num_context:]
        assert row["num_label_tokens"] == row["num_tokens"] - num_context
        # A further piece begins as every text does, and then with the last token of the piece before.
        assert num_context == (num_prefix + 1 if number else 1)
        assert number == len(pieces) - 1 or row["input_ids"][-1] == pieces[number + 1]["input_ids"][num_prefix]
        assert row["input_ids"][:num_prefix] == expected[:num_prefix]
    # Nothing predicts the very first token, so its text does not count: a character even where it is a part of one.
    first = "" if num_prefix else text[: tokenizer(text, return_offsets_mapping=True)["offset_mapping"][0][1]]
    assert sum(row["target_bytes"] for row in pieces) == len(text.encode()) - len(first.encode())


@pytest.mark.parametrize(("kind", "num_prefix"), [("byte_level", 0), ("metaspace_always", 1)])
def test_every_token_of_four_books_is_a_label(prepare, kind, num_prefix):
    tokenizer = EXACT_KINDS[kind]()
    books = [write_book(number) for number in range(4)]
    rows = prepare(tokenizer, [{"text": book} for book in books], max_length_tokens=1024)
    for number, book in enumerate(books):
        assert_every_token_is_a_label(rows.train, book, tokenizer, number, num_prefix, 1024)
    assert sum(rows.train["num_label_tokens"]) > 4 * 4_000
    assert len(set(rows.train["row_id"])) == len(rows.train)
    expected = f"split 4 of 4 training rows, plain text longer than data.max_length_tokens = 1024, into {len(rows.train):,} rows"
    assert rows.remarks == [f"{expected} that hold every token"]


def test_all_pieces_of_a_text_lie_on_one_side_of_the_split(prepare):
    books = [{"text": write_book(number, 600)} for number in range(40)]
    rows = prepare(build_byte_level(), books, max_length_tokens=50, eval_fraction=0.4)
    trained, evaluated = ({row_id % PIECE for row_id in side["row_id"]} for side in (rows.train, rows.evaluation))
    assert trained | evaluated == set(range(40)) and not trained & evaluated and min(len(trained), len(evaluated)) > 5
    counts = [f"split {len(of)} of {len(of)} {name} rows" for name, of in (("training", trained), ("evaluation", evaluated))]
    assert [remark.split(",")[0] for remark in rows.remarks] == counts


def test_a_limit_without_room_for_a_label_is_refused(prepare):
    text, tokenizer = [{"text": "the word"}], build_metaspace("always")
    sentence = "data.max_length_tokens = 2 leaves no room for a label: give a row at least 3"
    assert sentence in refusal(prepare, tokenizer, text, max_length_tokens=2)
    rows = prepare(tokenizer, text, max_length_tokens=3)
    assert_every_token_is_a_label(rows.train, "the word", rows.tokenizer, 0, 1, 3)


def test_the_share_of_tokens_that_a_cut_loses_is_reported(prepare):
    pairs = [{"prompt": "so", "completion": " it is" * n} for n in (1, 2, 3, 40)]
    whole = prepare(build_byte_level(), pairs).train["num_tokens"]
    for limit, marked in ((whole[3] - 1, False), (20, True)):
        rows = prepare(build_byte_level(), pairs, max_length_tokens=limit)
        share = 100 * (sum(whole) - sum(rows.train["num_tokens"])) / sum(whole)
        sentence = f"cut 1 of 4 training rows to data.max_length_tokens = {limit}: {share:.1f} % of all training row tokens lost"
        fix = f"; raise data.max_length_tokens (the longest row has {whole[3]} tokens), or split these rows"
        assert rows.remarks == [f"WARNING: {sentence}{fix}" if marked else sentence]
    lost = np.zeros(10_000, dtype=int)
    lost[0] = 1
    assert ": less than 0.1 % of all" in describe_cut(np.full(10_000, 9), lost, 10_000, "evaluation", "data.x = 9")[0]


def test_rows_that_the_tokenizer_makes_nothing_of_are_not_said_to_be_cut(prepare):
    rows = prepare(build_word_piece(), [{"text": "\u200b"}, {"text": "the word"}, {"text": "\u200d"}])
    assert len(rows.train) == 1
    assert rows.remarks[1:] == ["left out 2 of 3 training rows, in which the tokenizer leaves nothing to predict"]
    sentence = "the tokenizer leaves nothing to predict in all 1 training rows: change the rows"
    assert sentence in refusal(prepare, build_word_piece(), [{"text": "\u200b"}])


def test_what_sources_and_targets_lose_to_a_limit_and_to_a_tokenizer_without_a_token_is_reported(prepare):
    """T5 has no token for braces and many scripts, and would learn summaries that lack them."""
    tokenizer = build_word_piece()
    rows = [{"source": "so it is " * n, "target": f"the {{x}} {end}" * n} for n, end in ((1, ""), (1, "."), (6, ""))]
    remarks = prepare(tokenizer, rows, DataConfig, max_source_length_tokens=9, max_target_length_tokens=8).remarks
    expected = []
    for side, limit in (("source", 9), ("target", 8)):
        given = [tokenizer(row[side])["input_ids"] for row in rows]
        kept = [ids[:limit] for ids in given]
        lost, unknown = len(given[2]) - limit, sum(ids.count(tokenizer.unk_token_id) for ids in kept)
        expected.append(
            f"WARNING: cut the {side} of 1 of 3 training rows to data.max_{side}_length_tokens = {limit}: "
            f"{100 * lost / sum(map(len, given)):.1f} % of all training {side} tokens lost; raise data.max_{side}_length_tokens "
            f"(the longest {side} has {len(given[2])} tokens), or split these rows"
        )
    share = 100 * unknown / sum(map(len, kept))
    expected.append(
        f"WARNING: {share:.1f} % of all training target tokens, in 3 of 3 rows, are unknown to the tokenizer: the model neither "
        "reads nor writes them"
    )
    assert remarks == expected


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
    # With several prompts in a text, a token ends where each ends, and no character lies between tokens.
    texts = [f"{prompt}{completion}{prompt}</s>{prompt}{completion}" for prompt, completion in pairs]
    places = [[*itertools.accumulate(map(len, (prompt, text, prompt, f"</s>{prompt}")))] for prompt, text in pairs]
    for text, marked, tokens in zip(texts, places, tokenize_texts(tokenizer, texts, places), strict=True):
        offsets = [(0, 0), *zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)]
        assert [offsets[first][1] for first in tokens.firsts] == marked, repr(text)
        assert all(a <= start <= b <= end for (a, b), (start, end) in itertools.pairwise(offsets)), repr(text)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokens.input_ids) == tokenizer.decode(whole), repr(text)


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
    spaced = tokenize_texts(tokenizer, ["  So  the", " word "], [[], []])
    assert [as_lists(tokens)[1:] for tokens in spaced] == [[[0, 4], [4, 9]], [[0], [5]]], "no character lies between tokens"
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


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always"])
def test_a_long_text_is_tokenized_in_blocks_as_it_is_whole(monkeypatch, scheme):
    texts = ["so it is\n  it\n\nis so " * 40, "so it is " * 40, "so\n", "é€" * 90]
    for tokenizer in (build_byte_level(), build_metaspace(scheme, corpus=["so", "it", "is"])):
        whole = tokenize_texts(tokenizer, texts, [[]] * len(texts))
        with monkeypatch.context() as patched:
            patched.setattr(spans, "_BLOCK_CHARACTERS", 64)
            patched.setattr(spans, "_MOST_CHARACTERS_AT_ONCE", 200)
            blocks = tokenize_texts(tokenizer, texts, [[]] * len(texts))
        assert [as_lists(tokens) for tokens in blocks] == [as_lists(tokens) for tokens in whole]


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
