"""What a chat template leaves out of a chat, whatever form it prints the rest in."""

import random

import pytest

from tests.support.chats import build_chat_tokenizer, say
from tests.support.refusals import refusal
from tests.support.template_shapes import CALL_FORMS, CONTENT_ONLY, CUTTING, MISTRAL, NASTY, PARSING, print_calls, random_value
from toolkit.data.rows.example import Example
from toolkit.data.tokens.chat_template import render_chat, render_turns
from toolkit.data.tokens.prompts import find_omissions, prepare_chat

TOOLS = [{"type": "function", "function": {"name": "get_time", "description": "tells the time"}}]
THINKING = [*say("what is two"), {"role": "assistant", "content": "<think>\nwell, so\n</think>\n\nit is 2"}]
KEYED = [*say("what is two"), {"role": "assistant", "content": "it is 2", "reasoning_content": "well, so"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer("<|im_start|>", "<|im_end|>", "<|eot_id|>")


def call(name="get_time", content="", **arguments):
    return {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def find(tokenizer, template, messages, tools=None):
    """(what, number of the message, excerpt) of each omission."""
    tokenizer.chat_template = template
    text, turns = render_turns(tokenizer, messages, tools)
    return [tuple(omission) for omission in find_omissions(text, messages, tools, turns)]


@pytest.mark.parametrize("template", CONTENT_ONLY.values(), ids=CONTENT_ONLY)
def test_templates_that_print_the_content_only(tokenizer, template):
    called = [*say("x", system=" be  brief\n"), call(content="Let me check.", zone="CET")]
    assert find(tokenizer, template, called, TOOLS) == [("tool call", 2, "get_time"), ("tools", None, "get_time")]
    assert find(tokenizer, template, THINKING) == []
    assert find(tokenizer, template, KEYED) == [("thinking", 1, "well, so")]


def test_a_template_without_a_form_for_the_system_turn_and_for_tools(tokenizer):
    messages = [*say("hello", system="be brief"), call(content="wait"), {"role": "tool", "content": "4 pm"}, *say("", "4 pm")[1:]]
    lost = [("system turn", 0, "be brief"), ("tool call", 2, "get_time"), ("text", 3, "4 pm")]
    assert find(tokenizer, MISTRAL, messages) == lost


def test_context_that_others_quote_is_missed_all_the_same(tokenizer):
    """A tool's short answer stands in the assistant's too, and a system turn may be part of a question."""
    answered = [{"role": "tool", "content": "42"}, *say("", "it is 42")[1:]]
    messages = [*say("what is it, be brief", system="be brief"), call(), *answered]
    losing = MISTRAL.replace("m.content + eos_token", "m.content + (m.tool_calls | string if m.tool_calls else '') + eos_token")
    assert find(tokenizer, losing, messages) == [("system turn", 0, "be brief"), ("text", 3, "42")]
    assert find(tokenizer, print_calls(CALL_FORMS["JSON"]), messages) == []
    cut = print_calls(CALL_FORMS["JSON"], "{{ m.content.split('</think>')[-1] }}")
    thinking = say("4", "<think>well, 4</think>4", "4", "4", "", "4", system="4")
    assert find(tokenizer, cut, thinking[1:]) == [("thinking", 1, "well, 4")]
    assert find(tokenizer, cut, thinking) == [("thinking", 2, "well, 4")]


def test_thinking_that_is_cut_and_thinking_in_another_form(tokenizer):
    assert find(tokenizer, CUTTING, THINKING) == find(tokenizer, CUTTING, KEYED) == [("thinking", 1, "well, so")]
    assert find(tokenizer, PARSING, THINKING) == find(tokenizer, PARSING, KEYED) == []
    other = [*say("what is two"), {"role": "assistant", "content": "it is 2", "thinking": "well, so"}]
    assert find(tokenizer, PARSING, other) == []


@pytest.mark.parametrize("form", CALL_FORMS.values(), ids=CALL_FORMS)
def test_whatever_form_a_call_has_it_is_found_and_a_lost_argument_is_missed(tokenizer, form):
    rng = random.Random(form)
    template = print_calls(form)
    losing = print_calls(form.replace("call.arguments", "less")).replace("[CALL]", "{% set less = call.smaller %}")
    for _ in range(60):
        names = rng.sample(["get_time", "search", "a"], 2)
        arguments = {rng.choice(["a", "search", "x y", "é"]) + str(i): random_value(rng) for i in range(rng.randrange(3))}
        content = "".join(rng.choices([*NASTY, "I search, then get_time"], k=2))
        messages = [*say("search a", system="".join(rng.choices(NASTY, k=3))), call(names[0], content, **arguments)]
        messages[-1]["tool_calls"] *= 2
        tools = [{"name": name, "description": rng.choice(NASTY)} for name in names]
        assert find(tokenizer, template, messages, tools) == []
        if "call |" not in form:  # else it prints all that is there
            for item in messages[-1]["tool_calls"]:
                item["function"] |= {"arguments": arguments | {"lost": "what was given"}, "smaller": arguments}
            assert find(tokenizer, losing, messages, tools) == [("tool call", 2, "lost")]


def test_a_name_that_the_chat_mentions_is_not_its_call_or_its_tool(tokenizer):
    template = CONTENT_ONLY["ChatML"]
    messages = [*say("use get_time"), call(content="I use get_time.")]
    assert find(tokenizer, template, messages, TOOLS) == [("tool call", 1, "get_time"), ("tools", None, "get_time")]
    only_first = print_calls(CALL_FORMS["JSON"]).replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    messages[1]["tool_calls"] *= 2
    assert find(tokenizer, only_first, messages, TOOLS) == [("tool call", 1, "get_time")]
    no_tools = print_calls(CALL_FORMS["JSON"]).replace("tools or []", "[]")
    assert find(tokenizer, no_tools, messages, TOOLS) == [("tools", None, "get_time")]


def test_what_is_to_be_trained_on_is_refused_and_the_rest_is_noted(tokenizer):
    def prepare(template, messages, loss_on="completions", **fields):
        tokenizer.chat_template = template
        return prepare_chat(tokenizer, Example(messages=messages, **fields), loss_on, "chats.jsonl, row 3").omitted

    assert refusal(prepare, CONTENT_ONLY["Llama 3"], [*say("x"), call(content="Let me check.")]) == (
        "chats.jsonl, row 3: the chat template leaves out the tool call of message 2, 'get_time', which is to be trained on: set "
        "data.chat_template to a template that prints it, or take it out of the row"
    )
    later = [*THINKING, *say("thanks", "welcome")]
    for messages, loss_on in ((THINKING, "completions"), (THINKING, "all"), (later, "completions")):
        assert "leaves out the thinking of message 2, 'well, so'" in refusal(prepare, CUTTING, messages, loss_on)
    for fields in ({"loss_on": "all"}, {"weight_0": [1]}, {"first_trained": 2}):
        assert prepare(CUTTING, later, **fields) == "thinking"
    assert prepare(MISTRAL, [*say("a", system="b c"), call(content="d"), *say("e", "f")], weight_0=[2], tools=TOOLS) == (
        "system turn, tool call, tools"
    )


def test_a_prompt_to_generate_from_is_searched_as_a_whole(tokenizer):
    tokenizer.chat_template = CUTTING
    messages = [*THINKING, *say("thanks")]
    prompt = render_chat(tokenizer, messages, TOOLS, for_generation=True)
    assert [item.what for item in find_omissions(prompt, messages, TOOLS)] == ["thinking", "tools"]
