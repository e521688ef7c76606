"""Text longer than a row is trained on whole, and a run says what a cut loses."""

import random

import numpy as np
import pytest

from tests.support.refusals import refusal
from tests.support.tokenizer_kinds import EXACT_KINDS, build_byte_level, build_metaspace, build_word_piece
from toolkit.config.data import DataConfig
from toolkit.data.tokens import offsets as spans
from toolkit.data.tokens.cuts import describe_cut, split_text

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


def test_blocks_that_part_tokens_of_a_long_text_lose_nothing_of_it(prepare, monkeypatch):
    """This tokenizer has tokens of a line break and a word: other tokens there, the same text."""
    monkeypatch.setattr(spans, "_BLOCK_CHARACTERS", 500)
    text = write_book(0, 8000)
    rows = prepare(build_metaspace("always"), [{"text": text}], max_length_tokens=64)
    assert rows.tokenizer.decode([t for row in rows.train for t in row["labels"] if t != -100], skip_special_tokens=True) == text
    assert sum(rows.train["target_bytes"]) == len(text.encode())


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


@pytest.mark.parametrize(("num_prefix", "limit"), [(0, 2), (0, 7), (1, 3), (2, 9)])
def test_pieces_of_any_length(num_prefix, limit):
    for num_tokens in range(1, 30):
        ids = np.arange(num_prefix + num_tokens, dtype=np.int32)
        pieces = list(split_text(ids, num_prefix, limit))
        labels = np.concatenate([piece.labels for piece in pieces])
        assert labels[labels != -100].tolist() == ids[1:].tolist()
        assert [piece.begin for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]] and pieces[-1].end == len(ids)
        assert all(len(piece.input_ids) <= limit for piece in pieces)
        assert all((piece.labels != -100).any() for piece in pieces if len(ids) > 1)


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


def test_the_share_of_tokens_that_sources_and_targets_lose_is_reported(prepare):
    tokenizer = build_metaspace("always")
    rows = [{"source": "so it is" * n, "target": f"the word{end}" * n} for n, end in ((1, ""), (1, "."), (6, ""))]
    remarks = prepare(tokenizer, rows, DataConfig, max_source_length_tokens=9, max_target_length_tokens=8).remarks
    for side, limit, sentence in zip(("source", "target"), (9, 8), remarks, strict=True):
        given = [len(tokenizer(row[side])["input_ids"]) for row in rows]
        share = 100 * (given[2] - limit) / sum(given)
        assert sentence == (
            f"WARNING: cut the {side} of 1 of 3 training rows to data.max_{side}_length_tokens = {limit}: {share:.1f} % of all "
            f"training {side} tokens lost; raise data.max_{side}_length_tokens (the longest {side} has {given[2]} tokens), or "
            "split these rows"
        )


def test_characters_that_the_tokenizer_has_no_token_for_are_reported(prepare):
    """T5 has none for braces and many scripts, and would learn summaries that lack them."""
    tokenizer = build_word_piece()
    rows = [{"source": "the word", "target": "the word"}, {"source": "the word", "target": "the {x}"}]
    [remark] = prepare(tokenizer, rows, DataConfig).remarks
    ids = [tokenizer(row["target"])["input_ids"] for row in rows]
    share = 100 * ids[1].count(tokenizer.unk_token_id) / sum(map(len, ids))
    assert remark == (
        f"WARNING: {share:.1f} % of all training target tokens, in 1 of 2 rows, are unknown to the tokenizer: the "
        "model neither reads nor writes them"
    )
