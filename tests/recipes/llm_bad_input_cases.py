"""Cases of test_llm_bad_input.py that are refused before a row is looked for; the others are in llm_bad_row_cases.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.recipes.bad_input import TOO_MANY_TOKENS, Case, Files, model_files, tokenizer_files
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 400, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def adapter(
    size: int, *, extra: dict[str, tuple[int, ...]] | None = None, base: dict[str, Any] | None = None, **own: Any
) -> Files:
    """A LoRA of rank 2 on the query projections of two layers, in a model of that hidden size.

    Args:
        extra: shapes of more tensors.
        base: what its `base.json` says, if it has one.
    """
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **own}
    places = [f"model.layers.{layer}.self_attn.q_proj.lora" for layer in range(2)]
    shapes = {f"{place}_{kind}.weight": shape for place in places for kind, shape in (("A", (2, size)), ("B", (size, 2)))}

    def weights() -> bytes:
        from safetensors.numpy import save

        zeros = {name: np.zeros(shape, np.float32) for name, shape in {**shapes, **(extra or {})}.items()}
        return save({f"base_model.model.{name}": zero for name, zero in zeros.items()})

    files: Files = {"adapter/adapter_config.json": json.dumps(settings), "adapter/adapter_model.safetensors": weights}
    return files | ({"adapter/base.json": json.dumps(base)} if base else {})


OTHER_MODEL = "--model.name_or_path {here}/other"
FROM_SCRATCH = "--model.from_scratch true"
LORA = "--adapter.method lora"
OWN_ADAPTER = f"{LORA} --adapter.name_or_path {{here}}/adapter"
MIX = "--data.source null --data.files null --data.mix"

FSDP1 = {"preset": "fsdp1_full_shard", "overrides": GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"]}
NOT_RESIZED = (
    "the vocabulary is not resized under sharding: resize the model with transformers' resize_token_embeddings, save it and give "
    "that as"
)
LINEAR = "linear ones end in: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
NOT_CAUSAL = "not a causal language model: take one such as Llama, Qwen or Gemma"

EARLY = {
    # The run config; tests/unit/config/test_load.py and test_mix.py have the others.
    "resized vocabulary": Case(
        flags="--model.resize_token_embeddings 512",
        sentence=f"unknown flag --model.resize_token_embeddings: {NOT_RESIZED} --model.name_or_path",
    ),
    "resized vocabulary in the YAML": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "model:\n  resize_token_embeddings: true\n"},
        sentence=f"{{here}}/run.yaml, line 2: unknown key model.resize_token_embeddings: {NOT_RESIZED} model.name_or_path",
    ),
    "adapter and freezing": Case(
        flags=f"{LORA} --model.freeze ['lm_head.*']",
        sentence="model.freeze is ['lm_head.*'], but adapter.method lora freezes the whole base: leave it out",
    ),
    "an adapter's weights in the model's place": Case(
        flags="--model.init_from {here}/adapter",
        files=adapter(16),
        sentence="model.init_from {here}/adapter is an adapter: give it as adapter.name_or_path, with its adapter.method",
    ),
    "adapter without input": Case(
        flags=f"{LORA} --adapter.dropout 1",
        sentence="adapter.dropout is 1, which leaves the adapter no input: give less",
    ),
    # The accelerate YAML.
    "whole model compiled": Case(
        overrides={"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        sentence="…/fsdp2_cpu.yaml: dynamo_config.dynamo_use_regional_compilation is not true: set it, blocks are compiled one "
        "by one (the loss and generation around them are not)",
    ),
    "frozen bf16 under FSDP1": Case(
        flags=f"{LORA} --model.frozen_dtype bfloat16",
        **FSDP1,
        sentence="model.frozen_dtype is bfloat16, but FSDP1 keeps frozen and trainable parameters in one tensor of one dtype: "
        "leave it out, or set fsdp_version: 2",
    ),
    "frozen bf16 without mixed precision": Case(
        flags=f"{LORA} --model.frozen_dtype bfloat16",
        preset="ddp_cpu",
        overrides={"mixed_precision": "no"},
        sentence="model.frozen_dtype is bfloat16, but mixed_precision is 'no': leave it out, or write mixed_precision: bf16",
    ),
    # The model.
    "T5": Case(
        flags=OTHER_MODEL,
        files=model_files({"model_type": "t5"}),
        sentence=f"model.name_or_path {{here}}/other is a t5 model, {NOT_CAUSAL}",
    ),
    "BART, whose decoder transformers takes for a causal model": Case(
        flags=OTHER_MODEL,
        files=model_files({"model_type": "bart"}),
        sentence=f"model.name_or_path {{here}}/other is a bart model, {NOT_CAUSAL}",
    ),
    "BERT, which transformers takes for a causal model": Case(
        flags=OTHER_MODEL,
        files=model_files({"model_type": "bert"}),
        sentence=f"model.name_or_path {{here}}/other is a bert model, {NOT_CAUSAL}",
    ),
    "mixture of experts": Case(
        flags=OTHER_MODEL,
        files=model_files({**LLAMA, "model_type": "mixtral", "num_local_experts": 2}),
        sentence="model.name_or_path {here}/other is a mixture of experts: its auxiliary loss is a mean over each micro-batch, "
        "which cannot be made exact over the global batch, so it is not supported: take a dense model",
    ),
    "adapter in the model's place": Case(
        flags="--model.name_or_path {here}/adapter",
        files=adapter(16),
        sentence="model.name_or_path {here}/adapter is an adapter: give its base there, and this folder as adapter.name_or_path "
        "with adapter.method",
    ),
    # The adapter; tests/unit/models/test_lora_refusals.py has more of these.
    "adapter of a wider model": Case(
        flags=OWN_ADAPTER,
        files=adapter(32),
        sentence="adapter.name_or_path {here}/adapter does not fit {here}/model: it has "
        "model.layers.0.self_attn.q_proj.lora_A.weight of shape (2, 32) instead of (2, 16)",
    ),
    # The tokenizer, before a row is looked for.
    "no end token": Case(
        flags=OTHER_MODEL,
        files=model_files(LLAMA) | tokenizer_files(TOO_MANY_TOKENS, pad_token="<pad>"),
        sentence="the tokenizer {here}/other has no end token to put after texts: set eos_token in its tokenizer_config.json",
    ),
    "broken chat template": Case(
        flags="--data.chat_template {here}/chat.jinja",
        files={"chat.jinja": "{% for message in messages %}\n{{ message.content }\n{% endfor %}"},
        sentence="the chat template is broken in line 2 (unexpected '}'): '{{ message.content }'; correct it, or set "
        "data.chat_template",
    ),
    "no such chat template": Case(
        flags="--data.chat_template {here}/chat.jinja",
        sentence="data.chat_template {here}/chat.jinja cannot be read (No such file or directory): give a file, or the template",
    ),
    # The first thing to be reported once rows are looked for.
    "missing file": Case(
        flags="--data.files {here}/rws.jsonl",
        files={"rows.json": ""},
        sentence="data.files: there is no file {here}/rws.jsonl: did you mean {here}/rows.json?",
    ),
}
