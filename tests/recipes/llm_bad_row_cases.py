"""Cases of test_llm_bad_input.py that rows, the model at work or a run before show: what is wrong, and what must be printed."""

from __future__ import annotations

import json
from typing import Any

from tests.recipes.bad_input import OTHER_DATA, WAYS_OUT, Case, Files, model_files
from tests.recipes.llm_bad_input_cases import FROM_SCRATCH, LLAMA, LORA, MIX, OTHER_MODEL, OWN_ADAPTER, adapter
from tests.support.chats import LLAMA2, STRIPPING, say

NUM_CHATS = 16
CHATS = [say(f"hello there {i:b}", "it is four", "thanks", "welcome " * (1 + i % 4), system="be brief") for i in range(NUM_CHATS)]
NEXT = NUM_CHATS + 1
"""Number of the first row behind those of the working run."""


def rows(*rows: dict[str, Any]) -> Files:
    """The rows of a run."""
    return {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def chats(*conversations: list[dict[str, Any]]) -> Files:
    """The rows of the working run, and behind them others."""
    return rows(*({"messages": messages} for messages in [*CHATS, *conversations]))


TEXT = rows(*({"text": f"hello there {i:b}"} for i in range(12)))

ROW = f"{{here}}/rows.jsonl, row {NEXT}"
DATA = {
    "no assistant turn": Case(
        files=chats(say("a")),
        sentence=f"{ROW}, column messages: no assistant turn, so there is nothing to train on: leave the row out",
    ),
    "template that cannot give masks": Case(
        flags="--data.chat_template {here}/chat.jinja",
        files=chats(say("a", "<think>b</think>c", "d", "e")) | {"chat.jinja": STRIPPING},
        sentence=f"{ROW}: the chat template does not show which tokens are the assistant's: it prints the first 2 messages "
        "differently when more follow (as if it left out earlier thinking); give data.chat_template with {% generation %} ... "
        "{% endgeneration %} around the assistant's text (recipes/chat_templates/chatml_generation.jinja is one for ChatML), or "
        "set data.loss_on all",
    ),
    "template that refuses a chat": Case(
        flags="--data.chat_template {here}/chat.jinja",
        files=chats([*say("a"), *say("a", "b")]) | {"chat.jinja": LLAMA2},
        sentence=f"{ROW}: the chat template refuses this conversation (Conversation roles must alternate "
        "user/assistant/user/assistant/...): change the row, or set data.chat_template to a template that takes it",
    ),
    "chats without a template": Case(
        flags=OTHER_MODEL,
        files=model_files(LLAMA),
        sentence="the tokenizer has no chat template, which chats need: set data.chat_template to one, or to a file with one",
    ),
    "all completions cut off": Case(
        flags="--data.max_length_tokens 8",
        sentence=f"all {NUM_CHATS} training conversations lost their whole completion to data.max_length_tokens = 8: raise it",
    ),
    "no usable columns": Case(
        files=rows({"question": "a", "answer": "b"}),
        sentence="{here}/rows.jsonl has none of the columns 'messages', 'conversations', 'instruction' and 'output', 'prompt' "
        "and 'completion', 'text' (its columns: question, answer): set data.messages_column, data.text_column, or "
        "data.prompt_column and data.completion_column",
    ),
    "columns of two kinds": Case(
        files=rows({"text": "a", "prompt": "b", "completion": "c"}),
        sentence="{here}/rows.jsonl can be read in more than one way, as prompt_completion ('prompt' with 'completion') and text "
        "('text') (its columns: text, prompt, completion): choose by data.format prompt_completion or text, or by "
        "data.messages_column, data.text_column, or data.prompt_column and data.completion_column",
    ),
    "column that does not exist": Case(
        flags="--data.text_column body",
        sentence="data.text_column is body, but that is not a column of {here}/rows.jsonl: name one that exists, or leave it out",
    ),
    "all rows empty": Case(
        files=rows({"prompt": "a", "completion": ""}, {"prompt": "", "completion": "b"}),
        sentence="none of the 2 rows can be used: skipped 1 of 2 rows of {here}/rows.jsonl with an empty completion (row 1); "
        "skipped 1 of 2 rows of {here}/rows.jsonl with an empty prompt (row 2); give a source with usable rows",
    ),
    "missing file of a mix": Case(
        flags=f'{MIX} [{{"source":"jsonl","files":"{{here}}/rows.jsonl"}},{{"source":"csv","files":"{{here}}/rws.csv"}}]',
        sentence="data.mix[1].files: there is no file {here}/rws.csv: …",
    ),
    "vocabulary too small for bytes": Case(
        flags=OTHER_MODEL,
        files=TEXT | model_files({**LLAMA, "vocab_size": 64}),
        sentence="the model has 64 token embeddings, fewer than the 258 that a byte-level tokenizer begins with: raise "
        "vocab_size in its config.json, or give it a tokenizer",
    ),
    "token budget below the longest row": Case(
        flags="--train.global_batch_size_tokens 8",
        sentence="train.global_batch_size_tokens is 8, less than the longest row (… tokens): raise it, or cut rows to fewer "
        "tokens",
    ),
    "rows longer than the model's positions": Case(
        files=model_files({**LLAMA, "max_position_embeddings": 16}, "model"),
        sentence="the longest row has … tokens, but {here}/model has only 16 positions: set data.max_length_tokens to at most 16",
    ),
    "generated texts longer than the model's positions": Case(
        flags="--eval.generate true --eval.max_new_tokens 100",
        sentence="a prompt has up to … tokens and eval.max_new_tokens is 100, together … tokens, but {here}/model has only 128 "
        "positions: set data.max_length_tokens plus eval.max_new_tokens to at most 128",
    ),
    "best metric that plain text does not give": Case(
        flags="--eval.best_metric rougeL --eval.generate true --data.eval_fraction 0.4",
        files=TEXT,
        sentence="eval.best_metric is rougeL, but no held-out row has a prompt: choose loss or the like",
    ),
    "best weights without held-out rows": Case(
        flags="--export.weights best --checkpoint.keep_best 1",
        files=TEXT,
        sentence="export.weights best needs held-out rows, but there are none: raise data.eval_fraction, or give data.eval_files",
    ),
    "model folder without weights": Case(
        sentence="model {here}/model has no loadable safetensors weights (…): give a folder with them, or model.from_scratch "
        "true for random ones",
    ),
}

# Only the weights, or the model at work, show it. `base` is a whole model.
MODEL = {
    "adapter of another base": Case(
        flags=f"--model.name_or_path {{here}}/base {OWN_ADAPTER}",
        files=TEXT | adapter(32, base={"name_or_path": "theirs", "revision": "v2", "bf16_sha256": {"model.norm.weight": "0"}}),
        sentence="adapter.name_or_path {here}/adapter was trained on another base than model.name_or_path {here}/base: 21 "
        "tensors differ, lm_head.weight the first; its base was theirs at revision v2",
    ),
    "model whose tokens see later ones": Case(
        flags=f"{OTHER_MODEL} {FROM_SCRATCH}",
        files=TEXT | model_files({**LLAMA, "is_causal": False}),
        sentence="LlamaForCausalLM cannot be trained here: its tokens see later ones, so it is not a causal language model",
    ),
}

# In the folder of a finished run, which must stay as it is. All but the last are refused before a row is looked for.
NOWHERE = "--data.files {here}/nowhere.jsonl"
CHECKPOINT = "{here}/runs/run/checkpoints/step-00000002"
AFTER_A_RUN = {
    "another packing": Case(
        flags=f"{FROM_SCRATCH} --data.packing false {NOWHERE}",
        sentence=f"data.packing is False, but {CHECKPOINT} was made with True: {WAYS_OUT}",
    ),
    "an adapter": Case(
        flags=f"--model.from_scratch false {LORA} {NOWHERE}",
        sentence=f"model.from_scratch is False, but {CHECKPOINT} was made with True: {WAYS_OUT}",
    ),
    "a budget of tokens": Case(
        flags=f"{FROM_SCRATCH} --train.global_batch_size_tokens 200 {NOWHERE}",
        sentence=f"train.global_batch_size_tokens is 200, but {CHECKPOINT} was made with None: {WAYS_OUT}",
    ),
    "another chat template": Case(
        flags=FROM_SCRATCH,
        files={"model/chat_template.jinja": LLAMA2},
        sentence=f"the data is not what {CHECKPOINT} was trained on, {OTHER_DATA}: {WAYS_OUT}",
    ),
}
