"""Which columns rows are read from: by their names, by `data.format` or by the settings of columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.rows.columns import choose_columns, choose_seq2seq_columns, describe_columns

CONFIG = LLMDataConfig(source="jsonl")


@pytest.mark.parametrize(
    ("existing", "settings", "expected"),
    [
        (["id", "messages"], {}, ("chat", ("messages",))),
        (["messages", "prompt", "tools"], {}, ("chat", ("messages", "tools"))),
        (["system", "messages"], {}, ("chat", ("messages", "system"))),
        (["tools", "id"], {"messages_column": "tools"}, ("chat", ("tools",))),
        (["prompt", "completion", "score"], {}, ("pair", ("prompt", "completion"))),
        (["text", "url"], {}, ("text", ("text",))),
        (["text", "tools"], {}, ("text", ("text",))),
        (["text", "messages"], {"text_column": "text"}, ("text", ("text",))),
        (["talk", "text"], {"messages_column": "talk"}, ("chat", ("talk",))),
        (["question", "completion", "text"], {"prompt_column": "question"}, ("pair", ("question", "completion"))),
        # A mix: what the setting names is not in this file.
        (["messages"], {"text_column": "body"}, ("chat", ("messages",))),
    ],
)
def test_columns_are_the_named_ones_or_those_with_the_usual_names(existing, settings, expected):
    assert choose_columns("a.csv", existing, replace(CONFIG, **settings)) == expected


@pytest.mark.parametrize(
    ("existing", "settings", "fragments"),
    [
        (
            ["question", "answer"],
            {},
            ["a.csv has none of the columns 'messages', 'conversations', 'instruction' and 'output', ", "answer)"],
        ),
        (["prompt", "answer"], {}, ["(its columns: prompt, answer): set data.messages_column, data.text_column"]),
        (
            ["text", "messages"],
            {},
            ["in more than one way, as messages ('messages') and text ('text') (its columns: text, messages)"],
        ),
        (
            ["a", "text", "prompt", "completion"],
            {"text_column": "a", "prompt_column": "prompt"},
            ["prompt_completion ('prompt' with 'completion') and text ('a')"],
        ),
        (["text", "text"], {}, ["a.csv has more than one column 'text'"]),
        (
            ["question", "completion"],
            {"prompt_column": "completion"},
            ["data.prompt_column and data.completion_column are both completion: name two columns"],
        ),
    ],
)
def test_no_column_or_several_kinds_are_refused_with_what_there_is(existing, settings, fragments):
    sentence = refusal(choose_columns, "a.csv", existing, replace(CONFIG, **settings))
    for fragment in fragments:
        assert fragment in sentence


ALPACA = ["id", "instruction", "input", "output", "history"]


@pytest.mark.parametrize(
    ("existing", "settings", "expected"),
    [
        (["id", "conversations", "system", "tools"], {}, ("sharegpt", ("conversations", "system", "tools"))),
        (ALPACA, {}, ("alpaca", ("instruction", "output", "input", "history"))),
        ([*ALPACA, "text"], {"format": "alpaca"}, ("alpaca", ("instruction", "output", "input", "history"))),
        ([*ALPACA, "text"], {"format": "text"}, ("text", ("text",))),
        ([*ALPACA, "text"], {"text_column": "text"}, ("text", ("text",))),
        (ALPACA, {"prompt_column": "instruction", "completion_column": "output"}, ("pair", ("instruction", "output"))),
        (["conversations"], {"messages_column": "conversations"}, ("chat", ("conversations",))),
        (["talk"], {"messages_column": "talk", "format": "sharegpt"}, ("sharegpt", ("talk",))),
        (["prompt", "completion", "messages"], {"format": "prompt_completion"}, ("pair", ("prompt", "completion"))),
    ],
)
def test_the_reading_is_by_the_columns_or_by_the_format(existing, settings, expected):
    assert choose_columns("a.csv", existing, replace(CONFIG, **settings), has_chat_template=True) == expected


@pytest.mark.parametrize(
    ("existing", "readings"),
    [
        (["prompt", "completion", "messages"], "messages ('messages') and prompt_completion ('prompt' with 'completion')"),
        (["conversations", "messages"], "messages ('messages') and sharegpt ('conversations')"),
        ([*ALPACA, "text"], "alpaca ('instruction' with 'output') and text ('text')"),
    ],
)
def test_two_readings_that_fit_are_refused_with_both_names(existing, readings):
    sentence = refusal(choose_columns, "a.csv", existing, CONFIG)
    names = readings.split(" ")
    assert sentence.startswith(f"a.csv can be read in more than one way, as {readings} (its columns: {', '.join(existing)})")
    assert f": choose by data.format {names[0]} or " in sentence


def test_a_format_without_its_columns_is_refused():
    assert refusal(choose_columns, "a.csv", ["text"], replace(CONFIG, format="alpaca")) == (
        "a.csv has no column 'instruction' (its columns: text): data.format alpaca reads 'instruction' and 'output'"
    )


def test_the_line_has_the_reading_and_every_column():
    columns = choose_columns("a.csv", ALPACA, CONFIG, has_chat_template=True)
    expected = "alpaca, as chats for the chat template, from instruction, output, input and history; not read: id"
    assert describe_columns(columns, ALPACA) == expected
    assert describe_columns(choose_columns("a.csv", ["text"], CONFIG), ["text"]) == "text, from text; no other columns"
    t5 = choose_seq2seq_columns("a.csv", ["source", "target", "id"], DataConfig())
    assert describe_columns(t5, ["source", "target", "id"]) == "a source with its target, from source and target; not read: id"
    assert "Alpaca's own words" in describe_columns(choose_columns("a.csv", ALPACA, CONFIG), ALPACA)
