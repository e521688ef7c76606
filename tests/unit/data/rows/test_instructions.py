"""Rows of ShareGPT and Alpaca: the turns and texts made of them, what is left out, and each mistake with its sentence."""

import json

import pytest

from tests.support.chats import say
from tests.support.refusals import refusal
from toolkit.data.rows.columns import Columns
from toolkit.data.rows.example import Example, build_example


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in pairs]


def sharegpt(conversations, **cells):
    row = {"conversations": conversations, **cells}
    return build_example(row, Columns("sharegpt", tuple(row)), "a.json, row 7")


def alpaca(kind: str = "alpaca", **cells):
    row = {"instruction": "add", "output": "3", **cells}
    return build_example(row, Columns(kind, tuple(row)), "a.json, row 7")


HELLO = turns(("human", "hello"), ("gpt", "one"))


@pytest.mark.parametrize("user", ["human", "user", "Human"])
@pytest.mark.parametrize("assistant", ["gpt", "assistant", "chatgpt", "bot", "model"])
def test_sharegpts_roles_are_users_and_assistants(user, assistant):
    expected = Example(messages=say("hello", "one", system="be brief"))
    for system in ("system", "developer"):
        assert sharegpt(turns((system, "be brief"), (user, "hello"), (assistant, "one"))) == expected
    assert sharegpt(json.dumps(turns((user, "hello"), (assistant, "one"))), system="be brief") == expected
    unspoken = sharegpt([{"role": user, "content": "hello", "from": None}, *HELLO[1:]], system=" ")
    assert unspoken == Example(messages=say("hello", "one"))


def test_sharegpts_calls_and_answers_of_tools():
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    row = sharegpt(turns(("human", "1?"), ("function_call", call), ("observation", "2"), ("gpt", "2")), tools='[{"name": "add"}]')
    assert [message["role"] for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1] == {"role": "assistant", "tool_calls": [json.loads(call)], "content": ""}
    assert row.tools == [{"name": "add"}]
    # Hermes writes the call as text.
    row = sharegpt(turns(("human", "1?"), ("gpt", "<tool_call>"), ("tool", "2"), ("gpt", "2")))
    assert row.messages[2] == {"role": "tool", "content": "2"}


def test_alpaca_is_a_chat_with_its_input_system_and_history():
    assert alpaca(input=" ") == Example(messages=say("add", "3"))
    row = alpaca(input="1 and 2", system="be brief", history=[["hello", "one"]])
    assert row == Example(messages=say("hello", "one", "add\n\n1 and 2", "3", system="be brief"))
    assert alpaca(input="1 and 2", system="be brief", history='[["hello", "one"]]') == row
    assert alpaca(input=None, system=None, history=[]) == alpaca(input="", history="") == alpaca()


def test_alpaca_without_a_template_is_a_prompt_in_its_own_words():
    assert alpaca("alpaca_text", input="1 and 2") == Example(
        prompt="Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nadd\n\n### Input:\n1 and 2\n\n### Response:\n",
        completion="3",
        lead_text="add\n\n1 and 2",
    )
    row = alpaca("alpaca_text", system="be brief", history=[["hello", "one"]])
    assert row.prompt == ("be brief\n\n### Instruction:\nhello\n\n### Response:\none\n\n### Instruction:\nadd\n\n### Response:\n")


@pytest.mark.parametrize(
    ("build", "given", "reason"),
    [
        (sharegpt, [], "with an empty conversation"),
        (sharegpt, HELLO[1:] + HELLO, "in which the assistant speaks first"),
        (sharegpt, HELLO[:1], "without an assistant turn"),
        (alpaca, {"instruction": " "}, "with an empty instruction"),
        (alpaca, {"output": None}, "with an empty output"),
        (alpaca, {"output": float("nan")}, "with a missing output (NA, NaN, None)"),
        (alpaca, {"history": [["a", " "]]}, "with an empty text in their history"),
    ],
)
def test_rows_with_nothing_to_learn_are_left_out_with_their_reason(build, given, reason):
    assert (build(given) if build is sharegpt else build(**given)) == reason


@pytest.mark.parametrize(
    ("build", "given", "sentence"),
    [
        (sharegpt, turns(("human", "a"), ("x", "b")), "turn 2: 'x' is not a role of ShareGPT: write one of human, "),
        (sharegpt, {"from": "human"}, "column conversations: {'from': 'human'} is not a list of turns"),
        (sharegpt, ["a"], "turn 1: 'a' is not a turn"),
        (sharegpt, [{"from": "human"}], 'turn 1 has no text in "value" (its keys: from)'),
        (sharegpt, [{"value": "a"}], 'turn 1 has no text in "from" (its keys: value)'),
        (sharegpt, turns(("human", "a"), ("function_call", "b")), "turn 2: not JSON"),
        (alpaca, {"input": ["a"]}, "column input: ['a'] is of type list, not text"),
        (alpaca, {"history": "a"}, "column history: not JSON"),
        (alpaca, {"history": {"a": "b"}}, "column history: {'a': 'b'} is not a list"),
        (alpaca, {"history": [["a", "b", "c"]]}, "history 1: ['a', 'b', 'c'] is not a pair: write [instruction, answer]"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_sentence(build, given, sentence):
    said = refusal(build, given) if build is sharegpt else refusal(build, **given)
    assert said.startswith(f"a.json, row 7, {sentence}")
