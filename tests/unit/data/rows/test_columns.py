"""Which columns rows are read from: by their names, by `data.format` or by the settings of columns."""

from dataclasses import replace

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import LLMDataConfig
from toolkit.data.rows.columns import choose_columns

CONFIG = LLMDataConfig(source="jsonl")


ALPACA = ["id", "instruction", "input", "output", "history"]
OF_ALPACA = ("instruction", "output", "input", "history")
USUAL = "'messages', 'conversations', 'instruction' and 'output', 'prompt' and 'completion', 'text'"
SEVERAL, NAMED = "can be read in more than one way, as", {"text_column": "a", "prompt_column": "prompt"}


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
        (["id", "conversations", "system", "tools"], {}, ("sharegpt", ("conversations", "system", "tools"))),
        (ALPACA, {}, ("alpaca", OF_ALPACA)),
        ([*ALPACA, "text"], {"format": "alpaca"}, ("alpaca", OF_ALPACA)),
        ([*ALPACA, "text"], {"format": "text"}, ("text", ("text",))),
        ([*ALPACA, "text"], {"text_column": "text"}, ("text", ("text",))),
        (ALPACA, {"prompt_column": "instruction", "completion_column": "output"}, ("pair", ("instruction", "output"))),
        (["conversations"], {"messages_column": "conversations"}, ("chat", ("conversations",))),
        (["talk"], {"messages_column": "talk", "format": "sharegpt"}, ("sharegpt", ("talk",))),
        (["prompt", "completion", "messages"], {"format": "prompt_completion"}, ("pair", ("prompt", "completion"))),
    ],
)
def test_columns_are_the_named_ones_or_those_with_the_usual_names(existing, settings, expected):
    assert choose_columns("a.csv", existing, replace(CONFIG, **settings), has_chat_template=True) == expected


@pytest.mark.parametrize(
    ("existing", "settings", "sentence"),
    [
        (["prompt", "answer"], {}, f"has none of the columns {USUAL} (its columns: prompt, answer): set data.messages_column"),
        (["text"], {"format": "alpaca"}, "has no column 'instruction' (its columns: text): data.format alpaca reads "),
        (
            ["conversations", "messages"], {},
            f"{SEVERAL} messages ('messages') and sharegpt ('conversations') (its columns: conversations, messages): choose by "
            "data.format messages or ",
        ),
        ([*ALPACA, "text"], {}, f"{SEVERAL} alpaca ('instruction' with 'output') and text ('text')"),
        (["a", "text", "prompt", "completion"], NAMED, f"{SEVERAL} prompt_completion ('prompt' with 'completion') and text ('a'"),
        (["text", "text"], {}, "has more than one column 'text'"),
        (["question", "completion"], {"prompt_column": "completion"}, "data.prompt_column and data.completion_column are both "),
    ],
)  # fmt: skip
def test_no_column_or_several_kinds_are_refused_with_what_there_is(existing, settings, sentence):
    assert refusal(choose_columns, "a.csv", existing, replace(CONFIG, **settings)).removeprefix("a.csv ").startswith(sentence)
