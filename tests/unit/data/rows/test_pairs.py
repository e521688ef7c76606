"""Rows of pairs: the shapes that people have, and what is left out."""

import json
from functools import partial

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import PreferenceDataConfig
from toolkit.data.rows.columns import choose_preference_columns
from toolkit.data.rows.example import build_example, list_cells, read_examples

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Why?"), ("assistant", "So."), ("assistant", "No."))
)
SYSTEM, AGAIN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Again?"}


def read(row: dict, *, has_chat_template: bool = False, **settings):
    config = PreferenceDataConfig(files="rows.jsonl", **settings)
    columns = choose_preference_columns("rows.jsonl", list(row), config, has_chat_template=has_chat_template)
    return build_example(row, columns, "rows.jsonl, row 1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why? ", "chosen": "So.", "rejected": "No."}, ("Why? ", "So.", "No.")),
        ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, ("The sky is", " blue.", " black.")),
        (
            {"chosen": "\n\nHuman: Why?\n\nAssistant: So it is.", "rejected": "\n\nHuman: Why?\n\nAssistant: So not."},
            ("\n\nHuman: Why?\n\nAssistant:", " So it is.", " So not."),
        ),
    ],
)
def test_texts_with_a_prompt_of_their_own_or_in_both(row, expected):
    example = read(row)
    assert (example.prompt, example.completion, example.rejected) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Why?\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # UltraFeedback's
        {"chosen": [USER | {"name": None}, GOOD], "rejected": [USER | {"content": [{"type": "text", "text": "Why?"}]}, BAD]},
        {"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "So.", "rejected": "No."},
        {"prompt": "Why?", "chosen": GOOD, "rejected": BAD},
        {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
        {
            "conversations": [{"from": "human", "value": "Why?"}],
            "chosen": {"from": "gpt", "value": "So."},
            "rejected": {"from": "gpt", "value": "No."},
        },
    ],
)
def test_messages_with_a_prompt_of_their_own_or_in_both(row):
    example = read(row)
    assert (example.messages, example.rejected, example.first_trained) == ([USER, GOOD], [USER, BAD], 1)
    cells = dict(zip(("prompt", "completion", "rejected", "text", "messages", "tools"), list_cells(example), strict=False))
    others = {"first_trained": [1], "weight_0": [[]], "lead_text": [""]}
    assert read_examples({name: [cell] for name, cell in cells.items()} | others) == [example]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "Why?"}, {"prompt": "Again?"}])
def test_earlier_turns_a_system_turn_and_tools_are_the_prompt(prompt):
    turns, others = [USER, GOOD, AGAIN], {"system": "Be brief.", "tools": [{"name": "look"}]}
    example = read({**prompt, "chosen": [*turns, GOOD], "rejected": [*turns, BAD], **others})
    assert example.rejected == [SYSTEM, *turns, BAD] and example.tools == [{"name": "look"}]
    assert example.trained_turns == [4]


def test_an_answer_before_that_ends_the_prompt_does_not_count_beside_a_system_turn():
    example = read({"system": "Be brief.", "prompt": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]})
    assert (example.messages, example.trained_turns) == ([SYSTEM, USER, GOOD, GOOD], [3])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"prompt_column": "chosen"}, "data.prompt_column and data.chosen_column are both chosen: name two columns"),
        ({}, "has no column 'rejected' (its columns: prompt, chosen): set data.chosen_column and data.rejected_column"),
    ],
)
def test_columns_that_are_missing_or_the_same_are_named_with_their_settings(settings, expected):
    assert expected in refusal(partial(read, **settings), {"prompt": "Why?", "chosen": "So."})


@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_texts_beside_a_column_of_system_turns_are_chats(system):
    example = read({"system": system, "prompt": "Why?", "chosen": "So.", "rejected": "No."}, has_chat_template=True)
    turns = [SYSTEM, USER] if system else [USER]
    assert (example.messages, example.rejected) == ([*turns, GOOD], [*turns, BAD])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Why?", "chosen": "So.", "rejected": "So."}, "with two equal answers"),
        ({"prompt": "Why?", "chosen": "So.", "rejected": " "}, "with an empty rejected"),
        ({"chosen": "So.", "rejected": "So."}, "with two equal answers"),
        ({"chosen": "So.", "rejected": "No."}, "whose answers begin differently, so that they have no prompt"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "with two equal answers"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "with an empty rejected"),
        ({"chosen": [USER, GOOD], "rejected": [AGAIN, BAD]}, "whose chosen and rejected have different prompts"),
        (
            {"prompt": "Again?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "with a prompt that is not that of chosen and rejected",
        ),
    ],
)
def test_rows_without_a_preference_are_left_out(row, reason):
    assert read(row) == reason


def test_a_weight_in_an_answer_is_refused():
    row = {"chosen": [USER, GOOD | {"weight": 0}, AGAIN, GOOD], "rejected": [USER, BAD]}
    assert refusal(read, row).startswith("rows.jsonl, row 1: a turn of an answer has weight 0")


def test_json_may_be_an_answer_and_a_prompt_is_not_guessed_beside_other_columns():
    example = read({"prompt": "Why?", "chosen": '[{"a": 1}]', "rejected": '{"role": "b"}'})
    assert (example.completion, example.rejected) == ('[{"a": 1}]', '{"role": "b"}')
    row = {"question": "Which?", "chosen": "The sky is blue.", "rejected": "The sky is black."}
    assert "set data.prompt_column to the column that has the prompt" in refusal(read, row)
    example = read({"id": 1, "chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."})
    assert example.completion == " So."
