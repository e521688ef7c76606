"""Rows of chats, of prompts and of text, and each mistake in them with its sentence."""

import json

import pytest

from tests.support.chats import say
from tests.support.refusals import refusal
from toolkit.data.rows.columns import Columns
from toolkit.data.rows.example import Example, build_example, build_schema, list_cells, read_examples

BRIEF = say("a", "b", system="be brief")
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}


def read(messages, tools=None):
    """A chat, or the reason to skip it."""
    return build_example({"messages": messages, "tools": tools}, Columns("chat", ("messages", "tools")), "a.jsonl, row 7")


def build(kind, **cells):
    return build_example(cells, Columns(kind, tuple(cells)), "x")


def weighted(*weights):
    """A chat whose assistant turns have these weights; `...` is none."""
    spoken = [message for number, _ in enumerate(weights) for message in say(f"question {number}", f"answer {number}")]
    for message, weight in zip(spoken[1::2], weights, strict=True):
        message.update({} if weight is ... else {"weight": weight})
    return spoken


def test_a_chat_is_grouped_by_all_before_its_first_answer():
    messages = say("hello", "one", "two", "three", system="be brief")
    example = read(messages)
    assert example == Example(messages=messages)
    assert (example.opening, example.group, example.held_out) == ("be brief\0hello", None, None)
    assert read(say("hello", "one", "two", "three")).opening == "hello"  # so that runs of older versions keep their split
    others = [read(say("hello", "1")), read(say("hello", "1", system="long")), read(say("hello", "1"), [{"name": "add"}])]
    others.append(read([*say("hello"), *say("and", "1")]))
    assert len({other.opening for other in [*others, example]}) == 5
    assert example.texts == ["be brief", "hello", "one", "two", "three"]


def test_a_chat_may_be_json_text_with_tools_as_text_or_lists():
    messages, tools = say("hello", "one"), [{"name": "add"}]
    assert read(messages, tools) == Example(messages=messages, tools=tools)
    assert read(json.dumps(messages), json.dumps(tools)) == read(messages, [json.dumps(tools[0])]) == read(messages, tools)
    assert read(messages, "").tools is read(messages, []).tools is None


OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
NULLS = [{"id": None, "type": "function", "function": {"strict": None, **CALL["tool_calls"][0]["function"]}}]
PARTS = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]  # as OpenAI's chats may have a text


def test_nulls_empty_lists_text_in_parts_and_calls_of_older_chats_are_read_as_messages():
    assert read([{"role": "user", "content": PARTS}, *say("", "2")[1:]]).messages == say("1 + 1?", "2")
    called = CALL | {"content": None, "name": None, "tool_calls": NULLS}
    messages = [{"role": "user", "content": "hi", "tool_calls": None}, called]
    messages += [{"role": "tool", "content": ""}, {"role": "assistant", "content": "one", "tool_calls": []}]
    expected = [say("hi")[0], CALL | {"content": ""}, messages[2], say("", "one")[1]]
    assert read(messages).messages == expected  # some templates print a call, or refuse the turn, wherever the key is
    developer = [{"role": "developer", "content": "be brief"}, *say("a", "b")]
    assert read(developer).messages == BRIEF  # who speaks for the system
    older = [say("hi")[0], OLD_CALL, {"role": "function", "name": "add", "content": "1"}, *expected[3:]]
    assert read(older).messages == [*expected[:2], {"role": "tool", "name": "add", "content": "1"}, *expected[3:]]


def test_weights_name_the_turns_that_do_not_count():
    """As OpenAI writes them, and as columnar files do: null where there is none, 0.0 and 1.0."""
    messages = weighted(0, 1, ..., None, 0.0, 1.0)
    messages[2]["weight"] = 0  # of a user: it says what is so anyway
    example = read(messages)
    assert example.weight_0 == [1, 2, 9]
    assert all("weight" not in message for message in example.messages)  # a template does not see it


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize(("no", "yes"), [(False, True), (0, 1), (0.0, 1.0)])
def test_the_keys_of_other_trainers_say_which_turns_count(key, no, yes):
    messages = weighted(..., ..., ...)
    messages[0][key], messages[1][key], messages[3][key], messages[5][key] = no, no, yes, None
    example = read(messages)
    assert (example.weight_0, example.messages) == ([0, 1], weighted(..., ..., ...))
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: no}, *weighted(...)]
    assert build("sharegpt", conversations=sharegpt).weight_0 == [1]
    messages[1]["weight"] = 1
    assert f"message 2, a turn of role assistant: weight 1 and {key} {no}: write 0 for a turn that" in refusal(read, messages)
    messages[0][key] = yes
    assert f"message 1, a turn of role user: {key} {yes}: write 0 for a turn" in refusal(read, messages)


def test_a_column_of_system_texts_becomes_the_first_turn():
    chat, with_system = weighted(0, 1), say("a", "b", system="be brief")
    example = build("chat", messages=chat, system="be brief")
    assert example.messages == [{"role": "system", "content": "be brief"}, *read(chat).messages]
    assert example.weight_0 == [2]
    for system in ("be brief", None, " "):
        assert build("chat", messages=with_system, system=system) == read(with_system)


def test_pairs_and_text_are_grouped_by_what_comes_first_and_a_pair_of_message_lists_is_a_chat_trained_on_its_completion():
    pair = build("pair", q="why", a=" because")
    assert pair == Example(prompt="why", completion=" because", lead_text="why") and pair.opening == "why"
    assert build("seq2seq", article="long", headline="short") == Example(prompt="long", completion="short", lead_text="long")
    text = build_example({"text": "once"}, Columns("text", ("text",)), "x", group="module", held_out=True)
    assert text == Example(text="once", group="module", held_out=True) and text.opening == "once"

    example = build("pair", prompt=say("hello", "one", "two"), completion=say("x", "three")[1:])
    assert example.messages == say("hello", "one", "two", "three")
    assert (example.first_trained, example.opening) == (3, "hello")
    as_json = {"prompt": json.dumps(say("hello", "one", "two")), "completion": json.dumps(say("x", "three")[1])}
    assert build("pair", **as_json) == example  # as CSV files have them
    of_code = build("pair", prompt="{'role': 'user'} is", completion='[{"a": 1}]')
    assert (of_code.prompt, of_code.completion) == ("{'role': 'user'} is", '[{"a": 1}]')


def test_what_is_stored_is_read_back():
    messages = [*say("é", "one"), CALL | {"extra": {"a": [1, 2.5, None, True]}}]
    examples = [read(messages, [{"name": "add"}]), read(weighted(0, 1)), build("text", text="b"), build("pair", q="c", a="d")]
    examples += [build("preference", p="a", a="b", b="c"), build("preference", p=say("a"), a=say("", "b")[1:], b="c")]
    names = build_schema().names[2:]
    columns = dict(zip(names, zip(*map(list_cells, examples), strict=True), strict=True))
    assert columns["messages"][2] is columns["messages"][3] is columns["text"][0] is None
    assert read_examples(columns) == examples


def test_chats_are_equal_if_they_say_and_train_the_same():
    """Parquet and other programs order keys by name; the turns to train on can be said in several ways."""
    messages = [*say("hi"), CALL, {"role": "tool", "content": "1"}, *say("", "one")[1:]]
    content = read(messages).content
    assert read([dict(sorted(message.items())) for message in messages]).content == content
    assert read([message | {"weight": int(message["role"] == "assistant")} for message in messages]).content == content
    assert build("pair", prompt=messages[:1], completion=messages[1:]).content == content
    without_the_last, tool = [*messages[:-1], messages[-1] | {"weight": 0}], [{"name": "add"}]
    others = [read(without_the_last), read(messages, tool), read([*messages, *say("x")]), read(say("a", "b"))]
    others += [build("text", text="a"), build("pair", prompt="a", completion="b"), read(say("a", "b"), [{}])]
    assert len({other.content for other in others} | {content}) == 8
    assert build("text", text="a").content == build_example({"t": "a"}, Columns("text", ("t",)), "y", group="g").content


@pytest.mark.parametrize(
    ("kind", "cells", "reason"),
    [
        *(("chat", (nothing,), "with an empty chat") for nothing in (None, [], " ")),
        ("chat", (say("hello", " "),), "with an empty assistant turn"),
        ("chat", (say("", "one"),), "with an empty user turn"),
        ("chat", (weighted(0, 0),), "with weight 0 on every assistant turn"),
        ("pair", (weighted(1)[:2] + say("b"), weighted(0)[1:]), "with weight 0 on every assistant turn"),
        ("pair", (" ", "b"), "with an empty prompt"),
        *(("pair", cells, "with an empty completion") for cells in (("a", ""), ("a", None), (say("a"), []))),
        ("text", ("\n",), "with an empty text"),
        ("seq2seq", (None, "b"), "with an empty source"),
        ("seq2seq", ("a", " "), "with an empty target"),
    ],
)
def test_rows_with_nothing_to_learn_come_with_their_reason(kind, cells, reason):
    assert build(kind, **dict(zip("ab", cells, strict=False))) == reason


TWO_TEXTS = "the column system and the system turn are different texts: leave one of them out"


def answer(**keys):
    return [*say("a"), {"role": "assistant", "content": "b"} | keys]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (3, 'column messages: 3 is not a list of messages: write {"role": ..., "content": ...} for each in a list'),
        ("[{role: 'user'}]", "column messages: not JSON (Expecting property name"),
        (str(say("a", "b")), f"column messages: {str(say('a', 'b'))!r:.60} are messages as Python prints them: write the column"),
        (["hi"], "message 1: 'hi' is not a message"),
        ([{"from": "human", "value": "hi"}], "message 1 has from and value, as ShareGPT's turns do: set data.format sharegpt"),
        ([{"role": "user"}], 'message 1 has no content (its keys: role): write {"role": ..., "content": ...}'),
        ([*say("a"), {"role": "assistant", "tool_calls": []}], "message 2 has no content (its keys: role)"),
        (answer(role="bot"), "message 2: 'bot' is not a role: write one of system, user, assistant"),
        (say("a", "b")[1:], "message 1: roles out of order, the assistant speaks first: begin with a user turn"),
        ([*say("a", "b"), *say(system="s")], "message 3: roles out of order, a system turn comes after others: put it first"),
        (answer(role="tool"), "message 2: roles out of order, a tool turn follows no assistant turn"),
        (say("a"), "column messages: no assistant turn, so there is nothing to train on: leave the row out"),
        (answer(content=["b"]), "message 2, content: 'b' is not a part of type text"),
        *(
            (answer(content=[*PARTS, part]), f"message 2, content: {part} is not a part of type text: leave the part or the row")
            for part in ({"type": "image", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"})
        ),
        (answer(content="b\ud83d"), "message 2, content: character 2 is half a surrogate pair"),
        (answer(at=b"c"), "message 2, at: b'c' is of type bytes"),
        (answer(**CALL | {"role": "user"}), "message 2: tool calls of role user"),
        (answer(tool_calls="add"), "message 2: tool_calls 'add' is not a list of calls"),
        (answer(tool_calls=[{"function": {}}]), "message 2: a tool call without a name"),
        *(
            (answer(tool_calls=[{"function": {"name": "f", "arguments": wrong}}]), f"message 2, arguments of f: not JSON ({why}")
            for wrong, why in (("{", ""), ('{"x": 1, "x": 2}', "the"))
        ),
        (answer(**OLD_CALL | CALL), "message 2 has function_call and tool_calls: leave one of them out"),
        (answer(**OLD_CALL | {"function_call": "add"}), "message 2: a tool call without a name"),
        (weighted(0.5), "message 2, a turn of role assistant: weight 0.5: write 0 for a turn that does not count in the loss, 1"),
        ([say("a")[0] | {"weight": 1}, *say("a", "b")[1:]], "message 1, a turn of role user: weight 1: write 0 for a turn"),
        (answer(loss="no"), "message 2, a turn of role assistant: loss 'no': "),
        *(
            (answer(**{key: [1]}), f'message 2: {key} is not read: write "weight": 0 for a turn that does not count in the loss')
            for key in ("train_detail", "loss_scale", "mask", "masked")
        ),
    ],
)
def test_chats_that_are_put_together_wrongly_are_refused_by_row_and_message(messages, sentence):
    assert refusal(read, messages).startswith(f"a.jsonl, row 7, {sentence}")


@pytest.mark.parametrize(
    ("kind", "cells", "sentence"),
    [
        ("pair", {"q": 3, "a": "b"}, "x, column q: 3 is of type int, not text"),
        *(
            (kind, dict.fromkeys(names, " [{'content': 'a',\n 'role': 'user'}\n {'content': nan}]"), f'x, column {names[0]}: " [')
            for kind, names in (("prompt", "a"), ("pair", "ab"), ("preference", "abc"), ("preference_alone", "ab"))
        ),  # numpy's, which parquet files are read as
        ("text", {"text": "a\0"}, "x, column text: the text holds a NUL"),
        ("text", {"text": ["a", "b"]}, "x, column text: ['a', 'b'] is of type list, not text: write it as a string"),
        ("seq2seq", {"source": "a", "target": say("x")}, "x, column target: [{'role': 'user', 'content': 'x'}] is of type list"),
        ("pair", {"prompt": say("a"), "completion": "b"}, "x: columns prompt and completion are of different kinds, and compl"),
        ("pair", {"prompt": say("hello", "one"), "completion": say("two")}, "x, column completion: no assistant turn"),
        ("chat", {"messages": say("a", "b"), "tools": "add"}, "x, column tools: not JSON"),
        ("chat", {"messages": say("a", "b"), "tools": {"name": "f"}}, "x, column tools: {'name': 'f'} is not a list of tools"),
        ("chat", {"messages": say("a", "b"), "tools": ["add"]}, "x, tool 1: not JSON"),
        ("chat", {"messages": say("a", "b"), "tools": [{"name": "add"}, 3]}, "x, tool 2: 3 is not a tool"),
        ("chat", {"messages": BRIEF, "system": "be long"}, f"x: {TWO_TEXTS}"),
        (
            "pair",
            {"prompt": "a", "completion": "b", "tools": '[{"name": "add"}]'},
            "x: column tools is not empty, but prompt and completion hold texts",
        ),
        ("preference", {"p": "a", "chosen": "b", "rejected": "c", "system": "be long"}, "x: column system is not empty"),
        ("sharegpt", {"conversations": BRIEF, "system": "be long"}, f"x: {TWO_TEXTS}"),
    ],
)
def test_cells_that_are_not_what_their_column_holds_are_refused(kind, cells, sentence):
    assert refusal(build, kind, **cells).startswith(sentence)
