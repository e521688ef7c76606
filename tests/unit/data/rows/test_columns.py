"""Which columns rows are read from, by their names, by `data.format` or by settings; rows of ShareGPT, of Alpaca and of pairs:
the turns and texts made of them, what is left out, and each mistake with its sentence."""

import json
from dataclasses import replace

import pytest

from tests.support.chats import say
from tests.support.refusals import refusal
from toolkit.config.data import LLMDataConfig, PreferenceDataConfig
from toolkit.data.rows.columns import choose_columns, choose_preference_columns
from toolkit.data.rows.example import Example, build_example

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


def read(row, *, has_chat_template=True, **settings):
    """The example in a row, or the reason to leave it out, by the columns that a run would choose."""
    config, choose = CONFIG, choose_columns
    if "chosen" in row:
        config, choose = PreferenceDataConfig(files="rows.jsonl"), choose_preference_columns
    columns = choose("a.json", list(row), replace(config, **settings), has_chat_template=has_chat_template)
    return build_example(row, columns, "a.json, row 7")


def turns(*pairs):
    return [{"from": who, "value": text} for who, text in pairs]


def sharegpt(*pairs, **cells):
    return {"conversations": turns(*pairs), **cells}


def alpaca(**cells):
    return {"instruction": "add", "output": "3", **cells}


HELLO, ONE = ("human", "hello"), ("gpt", "one")


@pytest.mark.parametrize("user", ["human", "user", "Human"])
@pytest.mark.parametrize("assistant", ["gpt", "assistant", "chatgpt", "bot", "model"])
def test_sharegpts_roles_are_users_and_assistants(user, assistant):
    expected = Example(messages=say("hello", "one", system="be brief"))
    for system in ("system", "developer"):
        assert read(sharegpt((system, "be brief"), (user, "hello"), (assistant, "one"))) == expected
    as_text = json.dumps(turns((user, "hello"), (assistant, "one")))
    assert read({"conversations": as_text, "system": "be brief"}) == expected
    unspoken = [{"role": user, "content": "hello", "from": None}, *turns(ONE)]
    assert read({"conversations": unspoken, "system": " "}) == Example(messages=say("hello", "one"))


def test_sharegpts_calls_and_answers_of_tools():
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": None, "c": [{"d": None}]}})
    calling = [("human", "1?"), ("function_call", call), ("observation", "2"), ("gpt", "2")]
    row = read(sharegpt(*calling, tools='[{"name": "add"}]'))
    assert [message["role"] for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1] == {"role": "assistant", "tool_calls": [json.loads(call)], "content": ""}
    assert row.tools == [{"name": "add"}]
    # Hermes writes the call as text.
    row = read(sharegpt(("human", "1?"), ("gpt", "<tool_call>"), ("tool", "2"), ("gpt", "2")))
    assert row.messages[2] == {"role": "tool", "content": "2"}


def test_alpaca_is_a_chat_with_its_input_system_and_history():
    assert read(alpaca(input=" ")) == Example(messages=say("add", "3"))
    row = read(alpaca(input="1 and 2", system="be brief", history=[["hello", "one"]]))
    assert row == Example(messages=say("hello", "one", "add\n\n1 and 2", "3", system="be brief"))
    assert read(alpaca(input="1 and 2", system="be brief", history='[["hello", "one"]]')) == row
    assert read(alpaca(input=None, system=None, history=[])) == read(alpaca(input="", history="")) == read(alpaca())


def test_alpaca_without_a_template_is_a_prompt_in_its_own_words():
    assert read(alpaca(input="1 and 2"), has_chat_template=False) == Example(
        prompt="Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nadd\n\n### Input:\n1 and 2\n\n### Response:\n",
        completion="3",
        lead_text="add\n\n1 and 2",
    )
    row = read(alpaca(system="be brief", history=[["hello", "one"]]), has_chat_template=False)
    assert row.prompt == ("be brief\n\n### Instruction:\nhello\n\n### Response:\none\n\n### Instruction:\nadd\n\n### Response:\n")


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Why?"), ("assistant", "So."), ("assistant", "No."))
)
SYSTEM, AGAIN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Again?"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why? ", "chosen": "So.", "rejected": "No."}, ("Why? ", "So.", "No.")),
        ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, ("The sky is", " blue.", " black.")),
        (
            {"id": 1, "chosen": "\n\nHuman: Why?\n\nAssistant: So it is.", "rejected": "\n\nHuman: Why?\n\nAssistant: So not."},
            ("\n\nHuman: Why?\n\nAssistant:", " So it is.", " So not."),
        ),
        ({"prompt": "Why?", "chosen": '[{"a": 1}]', "rejected": '{"role": "b"}'}, ("Why?", '[{"a": 1}]', '{"role": "b"}')),
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
        {"conversations": turns(("human", "Why?")), "chosen": turns(("gpt", "So."))[0], "rejected": turns(("gpt", "No."))[0]},
        {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "system": ""},  # beside a column of system turns, texts are chats
    ],
)
def test_messages_with_a_prompt_of_their_own_or_in_both(row):
    example = read(row)
    assert (example.messages, example.rejected, example.first_trained) == ([USER, GOOD], [USER, BAD], 1)


TURNS, TOOLS = [USER, GOOD, AGAIN], [{"name": "look"}]


@pytest.mark.parametrize(
    ("row", "prompt", "has_chat_template"),
    [
        *(
            ({**given, "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD], "tools": TOOLS}, TURNS, False)
            for given in ({}, {"prompt": "Why?"}, {"prompt": "Again?"})
        ),
        ({"prompt": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, [USER, GOOD], True),  # which ends in an answer
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, [USER], True),
    ],
)
def test_earlier_turns_and_a_system_turn_are_the_prompt_beside_tools(row, prompt, has_chat_template):
    example = read(row | {"system": "Be brief."}, has_chat_template=has_chat_template)
    assert (example.messages, example.rejected) == ([SYSTEM, *prompt, GOOD], [SYSTEM, *prompt, BAD])
    assert (example.trained_turns, example.tools) == ([len(prompt) + 1], row.get("tools"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sharegpt(), "with an empty conversation"),
        (sharegpt(ONE, HELLO, ONE), "in which the assistant speaks first"),
        (sharegpt(HELLO), "without an assistant turn"),
        (alpaca(instruction=" "), "with an empty instruction"),
        (alpaca(output=None), "with an empty output"),
        (alpaca(output=float("nan")), "with a missing output (NA, NaN, None)"),
        (alpaca(history=[["a", " "]]), "with an empty text in their history"),
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
def test_rows_with_nothing_to_learn_are_left_out_with_their_reason(row, reason):
    assert read(row) == reason


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (sharegpt(("human", "a"), ("x", "b")), ", turn 2: 'x' is not a role of ShareGPT: write one of human, "),
        ({"conversations": {"from": "human"}}, ", column conversations: {'from': 'human'} is not a list of turns"),
        ({"conversations": ["a"]}, ", turn 1: 'a' is not a turn"),
        ({"conversations": [{"from": "human"}]}, ', turn 1 has no text in "value" (its keys: from)'),
        ({"conversations": [{"value": "a"}]}, ', turn 1 has no text in "from" (its keys: value)'),
        (sharegpt(("human", "a"), ("function_call", "b")), ", turn 2: not JSON"),
        (alpaca(input=["a"]), ", column input: ['a'] is of type list, not text"),
        (alpaca(history="a"), ", column history: not JSON"),
        (alpaca(history={"a": "b"}), ", column history: {'a': 'b'} is not a list"),
        (alpaca(history=[["a", "b", "c"]]), ", history 1: ['a', 'b', 'c'] is not a pair: write [instruction, answer]"),
        ({"chosen": [USER, GOOD | {"weight": 0}, AGAIN, GOOD], "rejected": [USER, BAD]}, ": a turn of an answer has weight 0"),
        (
            {"question": "Which?", "chosen": "The sky is blue.", "rejected": "The sky is black."},
            ": columns chosen and rejected do not begin with a prompt that ends in 'Assistant:': set data.prompt_column to the "
            "column that has the prompt",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_one_sentence(row, sentence):
    assert refusal(read, row).startswith(f"a.json, row 7{sentence}")


def test_columns_of_pairs_that_are_missing_or_the_same_are_named_with_their_settings():
    row = {"prompt": "Why?", "chosen": "So."}
    both = "data.prompt_column and data.chosen_column are both chosen: name two columns"
    assert refusal(read, row, prompt_column="chosen") == both
    missing = "has no column 'rejected' (its columns: prompt, chosen): set data.chosen_column and data.rejected_column"
    assert missing in refusal(read, row)
