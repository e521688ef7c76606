"""Chat templates: which text is the assistant's, and templates that cannot say."""

import re
from pathlib import Path

import pytest

from tests.support.chats import CHATML, CLOSING, LLAMA2, MARKED, PROMPTING, STRIPPING, TURNS, build_chat_tokenizer, say
from tests.support.refusals import refusal
from toolkit.data.rows.example import Example
from toolkit.data.tokens.chat_template import NoMaskError, RefusedChatError, check_chat_template, read_chat_template, render_turns
from toolkit.data.tokens.chat_template import render_chat as render_marked
from toolkit.data.tokens.prompts import prepare_chat
from toolkit.data.tokens.special_tokens import show

CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
ANSWER = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def render_chat(tokenizer, messages, tools, **options):
    return show(tokenizer, render_marked(tokenizer, messages, tools, **options))


def find(tokenizer, template, messages, tools=None):
    """(content, what ends the turn) of each turn."""
    tokenizer.chat_template = template
    marked, turns = render_turns(tokenizer, messages, tools)
    assert (text := show(tokenizer, marked)) == render_chat(tokenizer, messages, tools)
    return [(text[turn.start : turn.content_end], text[turn.content_end : turn.end]) for turn in turns]


IM_END = "<|im_end|>"
BASIC, TWO = say("hello", "one"), say("hello", "one", "two", "three")
OF_TWO = [("one", IM_END), ("three", IM_END)]
THINKING = say("hello", "<think>hm</think>one", "two", "<think>hm</think>three")
# "think" is in what this one prints before the content, too.
THINKING_CHATML = CHATML.replace(
    "message.role + '\\n'", "message.role + '\\n' + ('' if message.role == 'user' else '<think></think>')"
)
CALLED = [*say("2 + 2?"), CALL, ANSWER, {"role": "assistant", "content": "four"}]
FOLLOWED = [*BASIC, {"role": "assistant", "content": "two"}, {"role": "user", "content": "bye"}]
QUOTING = say("one", "one", "assistant\none", "<|im_end|> is a token", "x", "im_end|>")
MARK_AGAIN = "{% endgeneration %}{% generation %}{% endgeneration %}{% generation %}"
LONG = say("hello", "one", "two", " three\n", "four", "one", system="be brief")
OTHER_END = TURNS.replace("'<|im_end|>\\n'", "('</s>' if loop.last and message.role == 'assistant' else '<|im_end|>')")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, LONG, [("one", IM_END), (" three\n", IM_END), ("one", IM_END)]),
        (MARKED, LONG, [("one", IM_END), ("three\n", IM_END), ("one", IM_END)]),
        (LLAMA2, TWO, [(" one ", "</s>"), (" three ", "</s>")]),
        # What closes the text after the last turn is not of it.
        (CLOSING, TWO, OF_TWO),
        (CLOSING.replace("'<|im_end|>\\n'", "'<|im_end|>'"), TWO, OF_TWO),
        # Content that the template words anew.
        (CHATML.replace("message.content }}", "(message.content | upper) }}"), BASIC, [("ONE", IM_END)]),
        (THINKING_CHATML, say("hello", "think"), [("<think></think>think", IM_END)]),
        (THINKING_CHATML, BASIC, [("<think></think>one", IM_END)]),
        # Turns that hold the text of another or of their own end; several in a row; calls.
        (CHATML, QUOTING, [("one", IM_END), ("<|im_end|> is a token", IM_END), ("im_end|>", IM_END)]),
        (CHATML, FOLLOWED, [("one", IM_END), ("two", IM_END)]),
        (CHATML, CALLED, [('<tool_call>add {"a": 2, "b": 2}</tool_call>', IM_END), ("four", IM_END)]),
        # Marks of the template's own, in parts too.
        (MARKED, THINKING, OF_TWO),
        (MARKED.replace(" + '<|im_end|>' }}", " }}" + MARK_AGAIN + "{{ '<|im_end|>' }}"), TWO, OF_TWO),
        (STRIPPING, THINKING[:2], [("<think>hm</think>one", IM_END)]),
        (STRIPPING, say("hello", "one", "two", "three\n", "a", "b"), [("one", IM_END), ("three\n", IM_END), ("b", IM_END)]),
        (OTHER_END, BASIC, [("one", "</s>")]),
        # The generation prompt after the last turn, whether asked for or not.
        *((PROMPTING, say("hi", text), [(text, "<|eot_id|>")]) for text in ("one", "assistant", "<|eot_id|> is a token")),
    ],
)
def test_every_turn_is_found_through_its_end_token_and_no_further(tokenizer, template, messages, expected):
    assert find(tokenizer, template, messages, TOOLS if messages is CALLED else None) == expected


TWO_PLEASE = "{% if messages | length != 2 %}{{ raise_exception('two, please') }}{% endif %}"
IN_WORDS = "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n' }}{% endfor %}{{ '### assistant:\n' }}"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (STRIPPING, LONG, "prints the first"),
        (STRIPPING, THINKING, "prints the first 2 messages differently when more follow"),
        (OTHER_END, TWO, "prints the first 2 messages differently when more follow"),
        (TWO_PLEASE + CHATML, BASIC, r"refuses the first 1 messages on their own \(two, please\)"),
        (MARKED.replace("message.role == 'assistant'", "loop.last"), TWO, "mark 1 texts for 2 assistant turns"),
        (PROMPTING, TWO, "prints the first 2 messages differently when more follow"),
        # The text of a call is the template's own: where it ends is not known from the message.
        (PROMPTING, [*say("hello"), CALL], "prints a generation prompt after the last turn without being asked"),
        (IN_WORDS, BASIC, "prints a generation prompt after the last turn without being asked"),
    ],
)
def test_a_template_that_does_not_show_its_turns_gives_no_mask(tokenizer, template, messages, reason):
    with pytest.raises(NoMaskError, match=reason):
        find(tokenizer, template, messages)


def test_an_end_mark_that_is_plain_text_to_the_tokenizer_ends_a_turn_too():
    messages = say("hello", "end", "two", "im_end")
    plain = build_chat_tokenizer()
    assert find(plain, CHATML, messages) == [("end", "<|im_end|>"), ("im_end", "<|im_end|>")]
    line_template = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    assert find(plain, line_template + prompt, messages) == [("end", "\n"), ("im_end", "\n")]


def test_the_marked_chatml_template_prints_as_qwen_does_and_marks_every_turn(tokenizer):
    template = (Path(__file__).parents[4] / "recipes/chat_templates/chatml_generation.jinja").read_text()
    calls = {"role": "assistant", "content": "wait", "tool_calls": CALLS * 2}
    last = {"role": "assistant", "content": "it is four", "reasoning_content": "hm"}
    messages = [*say("hello", " one\n", "<think>a</think>b", "<think>a</think>b", "2 + 2?", system="be brief"), CALL, ANSWER]
    messages += [calls, ANSWER, ANSWER, last]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    assert find(tokenizer, template, messages, TOOLS) == [
        (text, "<|im_end|>")
        for text in (" one\n", "<think>a</think>b", call, f"wait\n{call}\n{call}", "<think>\nhm\n</think>\n\nit is four")
    ]
    text = render_chat(tokenizer, messages, TOOLS)
    assert text.startswith("<|im_start|>system\nbe brief\n\n# Tools\n\nYou may call one or more functions to assist")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n\nFor each function call' in text
    answer = "\n<tool_response>\n4\n</tool_response>"
    assert f"{call}<|im_end|>\n<|im_start|>user{answer}{answer}<|im_end|>\n<|im_start|>assistant\n<think>" in text
    assert render_chat(tokenizer, say("a", "b", "c", system="d"), None, for_generation=True) == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(tokenizer, say("a"), TOOLS).startswith("<|im_start|>system\n# Tools\n\nYou may call")


def test_the_plain_template_ends_answers_with_the_end_token_and_takes_no_tools():
    tokenizer = build_chat_tokenizer()
    template = (Path(__file__).parents[4] / "recipes/chat_templates/plain.jinja").read_text()
    messages = say("hello", " one\n", "two", "three", system="be brief")
    end = tokenizer.eos_token
    assert find(tokenizer, template, messages) == [(" one\n", end), ("three", end)]
    prompt = render_chat(tokenizer, messages[:-1], None, for_generation=True)
    assert prompt == f"<s>System:\nbe brief\nUser:\nhello\nAssistant:\n one\n{end}\nUser:\ntwo\nAssistant:\n"
    assert render_chat(tokenizer, messages, None) == f"{prompt}three{end}\n"
    thinking = [*say("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    for refused, tools in ((messages, TOOLS), ([*say("a"), CALL], None), ([*say("a"), ANSWER], None), (thinking, None)):
        with pytest.raises(RefusedChatError, match="no form for tools and thinking"):
            render_chat(tokenizer, refused, tools)


def test_the_date_that_llamas_templates_print_does_not_depend_on_the_day(tokenizer):
    tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    )
    assert render_chat(tokenizer, say("a"), None) == "26 Jul 2024"
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}{% set now = strftime_now %}{{ now('%B') }}"
    assert render_chat(tokenizer, say("a"), None) == "2024-07-26 00:00:00.000000July"


def test_a_template_with_a_syntax_error_none_and_no_default_one_are_refused(tokenizer):
    broken = "{{ bos_token }}\u2028\x0c\n{% for message in messages %}\n{{ message.content }\n{% endfor %}"
    for template, sentence in (
        (broken, "chat template is broken in line 3 (unexpected '}'): '{{ message.content }'"),
        (None, "has no chat template, which chats need: set data.chat_template"),
        ({"rag": CHATML, "tool_use": CHATML}, "chat templates rag, tool_use, but no default one"),
    ):
        tokenizer.chat_template = template
        assert sentence in refusal(render_chat, tokenizer, say("a"), None)
        assert template is None or sentence in refusal(check_chat_template, tokenizer), "before any row is read"
    assert "Tools:" in render_chat(tokenizer, say("a"), TOOLS)


def test_the_setting_is_a_template_or_a_file(tmp_path):
    assert read_chat_template(CHATML) == CHATML
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    (tmp_path / "chat.jinja").write_text(LLAMA2)
    assert read_chat_template(str(tmp_path / "chat.jinja")) == LLAMA2
    no_file = "data.chat_template chatml cannot be read (No such file or directory)"
    assert no_file in refusal(read_chat_template, "chatml")
    (tmp_path / "chat.jinja").write_bytes(b"caf\xe9 ")
    assert "chat.jinja is not valid UTF-8" in refusal(read_chat_template, str(tmp_path / "chat.jinja"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // (messages | length - 2) }}",
        "{{ 'a' + messages }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 10.0 ** (messages | length * 1000) }}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
    ],
)
def test_arithmetic_and_recursion_of_a_template_are_one_sentence(tokenizer, template):
    tokenizer.chat_template = template
    check_chat_template(tokenizer)
    sentence = refusal(prepare_chat, tokenizer, Example(messages=BASIC), "completions", "row 3")
    assert re.match(r"row 3: the chat template refuses this conversation \(.*\): change the row, or ", sentence)
