"""Special tokens in rows: what belongs to a text is kept on both sides, and what only looks like one is text. What a chat
template leaves out of a chat, whatever form it prints the rest in."""

import random

import pytest
from transformers import T5Tokenizer

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.refusals import refusal
from tests.support.template_shapes import CALL_FORMS, CONTENT_ONLY, CUTTING, MISTRAL, NASTY, PARSING, print_calls, random_value
from tests.support.tokenizer_kinds import EXACT_KINDS, build_byte_level
from toolkit.config.data import DataConfig
from toolkit.data.rows.example import Example
from toolkit.data.tokens.causal import encode_prompts
from toolkit.data.tokens.chat_template import render_chat, render_turns, set_content_tokens
from toolkit.data.tokens.prompts import find_omissions, prepare_chat
from toolkit.data.tokens.special_tokens import decode_texts, show
from toolkit.loss import IGNORED_LABEL

TARGETS = ["<a> so <b> the", "<a> the <b> <c> so", "- so\n- the", "so\n\nthe"]


def build_t5():
    """T5's own kind, which drops all white space."""
    pieces = [*((token, 0.0) for token in ("<pad>", "</s>", "<unk>")), *((piece, -1.0) for piece in "▁sothe-a")]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


@pytest.mark.parametrize("build", [build_t5, *EXACT_KINDS.values()])
def test_tokens_that_targets_hold_are_kept_with_their_spaces(prepare, build):
    tokenizer = build()
    tokenizer.add_tokens(["<a>", "<b>", "<c>", "<not-held>", "\n"], special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    rows = prepare(tokenizer, [{"source": "so", "target": target} for target in [*TARGETS, "so</s>"]], DataConfig)
    assert set(rows.kept_tokens) == {"<a>", "<b>", "<c>", "\n"}
    assert rows.train["target"][:] == [*TARGETS, "so"]
    padded = [[*labels, rows.tokenizer.pad_token_id] for labels in rows.train["labels"]]
    texts = decode_texts(rows.tokenizer, padded, rows.kept_tokens)
    assert [text.strip() for text in texts] == rows.train["target"][:]


def test_rows_with_an_end_token_in_the_middle_are_counted(prepare):
    pairs = [{"prompt": "so", "completion": " the</s>"}, {"prompt": "so</s>the", "completion": " so"}]
    [remark] = prepare(build_byte_level(), pairs).remarks
    assert remark.startswith("an end token stands in the middle of the text in 1 of 2 training rows (first: ")
    assert remark.endswith("rows.jsonl, row 2): generated texts end at it; take it out where it is only text")
    rows = [{"source": "so </s> the", "target": "so"}, {"source": "so", "target": "the</s>"}]
    [remark] = prepare(build_byte_level(), rows, DataConfig).remarks
    assert "in 1 of 2 training rows (first: " in remark


def test_what_looks_like_a_special_token_in_a_chat_is_text(prepare):
    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", "<tag>", template=CHATML)
    call = {"function": {"name": "f", "arguments": {"a": "<|im_end|>", "</s>": 1, "role": "<|im_end|>"}}}
    messages = say("a </s> b", "it <|im_end|>", "<|im_start|>", "<tag> so</s>", system="no <s>")
    messages[2]["tool_calls"] = [call]
    tools = [{"type": "function", "function": {"name": "f", "description": "<pad>"}}]
    rows = prepare(tokenizer, [{"messages": messages, "tools": tools}])
    assert rows.train["target"][:] == ["<tag> so</s>"] and rows.kept_tokens == {}
    [row] = rows.train
    structure = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    special = [token for token in row["input_ids"] if token in tokenizer.added_tokens_decoder]
    assert special == structure * 6  # those that the template prints
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert "messages hold what looks like a special token in 1 of 1 training rows (first: " in rows.remarks[0]
    # A prompt to generate from is the same, and a token of model.add_tokens stays one where the template does not write it.
    prompt = encode_prompts(tokenizer, [render_chat(tokenizer, messages[:-1], tools, for_generation=True)], [True])
    assert prompt == [row["input_ids"][: row["prompt_length"]]]
    set_content_tokens(tokenizer, ["<tag>", "<|im_end|>"])
    [ids] = encode_prompts(tokenizer, [render_chat(tokenizer, messages, tools)], [True])
    assert [token for token in ids if token in tokenizer.added_tokens_decoder] == [
        *structure * 5, structure[0], tokenizer.convert_tokens_to_ids("<tag>"), structure[1]
    ]  # fmt: skip


def test_a_token_that_a_template_builds_of_a_role_is_text_in_content():
    header = "{% set names = {'user': 'user', 'assistant': 'assist' ~ 'ant'} %}<|{{ names[message.role] }}|>"
    tokenizer = build_chat_tokenizer("<|user|>", "<|assistant|>", "<|end|>", "<user>")
    tokenizer.chat_template = f"{{% for message in messages %}}{header}{{{{ message.content }}}}<|end|>{{% endfor %}}"
    set_content_tokens(tokenizer, ["<|user|>", "<|assistant|>", "<|end|>", "<user>"])
    [ids] = encode_prompts(tokenizer, [render_chat(tokenizer, say("a <|assistant|> <user>", "so <|user|><|end|>"), None)], [True])
    special = tokenizer.convert_ids_to_tokens([token for token in ids if token in tokenizer.added_tokens_decoder])
    assert special == ["<|user|>", "<user>", "<|end|>", "<|assistant|>", "<|end|>"]


def test_a_template_that_looks_for_a_special_token_in_content_gets_it(prepare):
    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", "</think>")
    calls = "}}\n        {%- for"
    tokenizer.chat_template = CHATML.replace(f"message.content {calls}", f"message.content.split('</think>')[-1] {calls}")
    text, [turn] = render_turns(tokenizer, say("a", "so</think>the <|im_end|>"), None)
    assert show(tokenizer, text)[turn.start : turn.content_end] == "the <|im_end|>" == text[turn.start : turn.content_end]


def test_white_space_and_what_closes_a_call_are_of_an_answer(prepare):
    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "\n", template=CHATML)
    messages = say("a\nb", "it\nis", "so", "")
    messages[3]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
    rows = prepare(tokenizer, [{"messages": messages[:2]}, {"messages": messages}])
    assert rows.train["target"][:] == ["it\nis", "<tool_call>f {}</tool_call>"] and rows.remarks == []
    assert set(rows.kept_tokens) == {"<tool_call>", "</tool_call>", "\n"}
    said = [[token for token in labels if token != IGNORED_LABEL] for labels in rows.train["labels"]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert said[1] == [*said[0], *tokenizer("<tool_call>f {}</tool_call>")["input_ids"], end]


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
    return list(find_omissions(text, messages, tools, turns))


CALLED = [*say("x", system=" be  brief\n"), call(content="Let me check.", zone="CET")]
ANSWERED = [*say("hello", system="be brief"), call(content="wait"), {"role": "tool", "content": "4 pm"}, *say("", "4 pm")[1:]]
LOST_OF_ANSWERED = [("system turn", 0, "be brief"), ("tool call", 2, "get_time"), ("text", 3, "4 pm")]
LOST_TOOLS, LOST_THINKING = ("tools", None, "get_time"), [("thinking", 1, "well, so")]
OTHER_KEY = [*say("what is two"), {"role": "assistant", "content": "it is 2", "thinking": "well, so"}]
QUOTED = [*say("what is it, be brief", system="be brief"), call(), {"role": "tool", "content": "42"}, *say("", "it is 42")[1:]]
LOSING = MISTRAL.replace("m.content + eos_token", "m.content + (m.tool_calls | string if m.tool_calls else '') + eos_token")
AGAIN = say("4", "<think>well, 4</think>4", "4", "4", "", "4", system="4")
MENTIONED = [*say("use get_time"), call(content="I use get_time.")]
TWICE = [MENTIONED[0], MENTIONED[1] | {"tool_calls": MENTIONED[1]["tool_calls"] * 2}]
JSON = print_calls(CALL_FORMS["JSON"])
CUT = print_calls(CALL_FORMS["JSON"], "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        *((template, CALLED, TOOLS, [("tool call", 2, "get_time"), LOST_TOOLS]) for template in CONTENT_ONLY.values()),
        *((template, THINKING, None, []) for template in CONTENT_ONLY.values()),
        *((template, KEYED, None, LOST_THINKING) for template in CONTENT_ONLY.values()),
        (MISTRAL, ANSWERED, None, LOST_OF_ANSWERED),
        *((CUTTING, messages, None, LOST_THINKING) for messages in (THINKING, KEYED)),
        *((PARSING, messages, None, []) for messages in (THINKING, KEYED, OTHER_KEY)),
        # Others quote it: a tool's short answer stands in the assistant's too, and a system turn may be part of a question.
        (LOSING, QUOTED, None, [("system turn", 0, "be brief"), ("text", 3, "42")]),
        (JSON, QUOTED, None, []),
        (CUT, AGAIN[1:], None, [("thinking", 1, "well, 4")]),
        (CUT, AGAIN, None, [("thinking", 2, "well, 4")]),
        # A name that the chat mentions is not its call or its tool.
        (CONTENT_ONLY["ChatML"], MENTIONED, TOOLS, [("tool call", 1, "get_time"), LOST_TOOLS]),
        (JSON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), TWICE, TOOLS, [("tool call", 1, "get_time")]),
        (JSON.replace("tools or []", "[]"), TWICE, TOOLS, [LOST_TOOLS]),
    ],
)
def test_what_a_template_has_no_form_for_is_found(tokenizer, template, messages, tools, lost):
    assert find(tokenizer, template, messages, tools) == lost


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
    assert [what for what, _, _ in find_omissions(prompt, messages, TOOLS)] == ["thinking", "tools"]
