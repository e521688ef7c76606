"""The cases of test_bad_input.py on the LLM recipe: what is wrong, and the one sentence that must be printed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.recipes.bad_input import OTHER_DATA, WAYS_OUT, Case, Files, model_files
from tests.support.chats import LLAMA2, say

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 400, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def adapter(size: int, base: dict[str, Any] | None = None) -> Files:
    """A LoRA of rank 2 on the query projections of two layers, in a model of that hidden size; what its `base.json` says."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    names = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{kind}.weight" for layer in (0, 1) for kind in "AB"]

    def weights() -> bytes:
        from safetensors.numpy import save

        return save({name: np.zeros((2, size) if "lora_A" in name else (size, 2), np.float32) for name in names})

    files: Files = {"adapter/adapter_config.json": json.dumps(settings), "adapter/adapter_model.safetensors": weights}
    return files | ({"adapter/base.json": json.dumps(base)} if base else {})


OTHER_MODEL = "--model.name_or_path {here}/other"
FROM_SCRATCH = "--model.from_scratch true"
LORA = "--adapter.method lora"
OWN_ADAPTER = f"{LORA} --adapter.name_or_path {{here}}/adapter"

# In one process, all in one launch; there is no data file.
ALONE = {
    "resized vocabulary": Case(
        flags="--model.resize_token_embeddings 512",
        sentence="unknown flag --model.resize_token_embeddings: did you mean --model.add_tokens?",
    ),
    "an adapter's weights in the model's place": Case(
        flags="--model.init_from {here}/adapter",
        files=adapter(16),
        sentence="model.init_from {here}/adapter is an adapter: give it as adapter.name_or_path, with its adapter.method",
    ),
    "adapter without input": Case(
        flags=f"{LORA} --adapter.dropout 1",
        sentence="--adapter.dropout is 1: give a number of 0 or more and below 1",
    ),
    "codes without an adapter": Case(
        flags="--adapter.base_dtype int8",
        sentence="adapter.base_dtype is int8, but adapter.method is none: set adapter.method, or leave adapter.base_dtype out",
    ),
    "frozen bf16 without mixed precision": Case(
        flags=f"{LORA} --model.frozen_dtype bfloat16",
        sentence="model.frozen_dtype is bfloat16, but mixed_precision is 'no': leave it out, or write mixed_precision: bf16",
    ),
    "adapter in the model's place": Case(
        flags="--model.name_or_path {here}/adapter",
        files=adapter(16),
        sentence="model.name_or_path {here}/adapter is an adapter: give its base there, and this folder as adapter.name_or_path "
        "with adapter.method",
    ),
    "no such chat template": Case(
        flags="--data.chat_template {here}/chat.jinja",
        sentence="data.chat_template {here}/chat.jinja cannot be read (No such file or directory): give a file, or the template",
    ),
}

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

# On two real ranks. Only the weights, or the model at work, show it. `base` is a whole model.
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

# In the folder of a finished run, which must stay as it is.
AFTER_A_RUN = {
    "another chat template": Case(
        flags=FROM_SCRATCH,
        files={"model/chat_template.jinja": LLAMA2},
        sentence=f"the data is not what {{here}}/runs/run/checkpoints/step-00000002 was trained on, {OTHER_DATA}: {WAYS_OUT}",
    ),
}
