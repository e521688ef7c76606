"""Special tokens in rows: what belongs to a text is kept on both sides, and what only looks like one is text."""

import pytest
from transformers import T5Tokenizer

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.tokenizer_kinds import EXACT_KINDS, build_byte_level
from toolkit.config.data import DataConfig
from toolkit.data.tokens.causal import encode_prompts
from toolkit.data.tokens.chat_template import render_chat, render_turns, set_content_tokens
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


@pytest.mark.parametrize(
    "header",
    [
        "{{ '<|' + message['role'] + '|>' }}",
        "<|{{ message.role }}|>",
        "{{ '<|%s|>' | format(message.role) }}",
        "{% set name = message.role %}{{ ['<', name, '>'] | join('|') }}",
        "{% set names = {'user': 'user', 'assistant': 'assist' ~ 'ant'} %}<|{{ names[message.role] }}|>",
    ],
)
def test_a_token_that_a_template_builds_of_a_role_is_text_in_content(header):
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
