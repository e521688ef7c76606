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
    # The run config; tests/unit/config/test_mix.py has more of these.
    "resized vocabulary": Case(
        flags="--model.resize_token_embeddings 512",
        sentence=f"unknown flag --model.resize_token_embeddings: {NOT_RESIZED} --model.name_or_path",
    ),
    "resized vocabulary in the YAML": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "model:\n  resize_token_embeddings: true\n"},
        sentence=f"{{here}}/run.yaml, line 2: unknown key model.resize_token_embeddings: {NOT_RESIZED} model.name_or_path",
    ),
    "mix beside a source": Case(
        flags='--data.mix [{"source":"some/rows"}]',
        sentence="data.source is given beside data.mix: move it into an entry of data.mix",
    ),
    "neither mix nor source": Case(
        flags="--data.source null --data.files null",
        sentence="give data.files or data.source, or data.mix for several sources: none is given",
    ),
    "unknown key of a mix entry": Case(
        flags=f'{MIX} [{{"source":"some/rows","wieght":2}}]',
        sentence="--data.mix: unknown key data.mix[0].wieght: did you mean weight?",
    ),
    "unknown key of a mix entry in the YAML": Case(
        flags="--config {here}/run.yaml --data.source null --data.files null",
        files={"run.yaml": "data:\n  mix:\n  - source: some/rows\n  - source: other/rows\n    split: train\n"},
        sentence="{here}/run.yaml, line 5: unknown key data.mix[1].split: did you mean hub_split?",
    ),
    "mix entry without its files": Case(
        flags=f'{MIX} [{{"source":"some/rows"}},{{"source":"jsonl"}}]',
        sentence="data.mix[1].source jsonl needs data.mix[1].files",
    ),
    "best metric without generation": Case(
        flags="--eval.best_metric rougeL", sentence="eval.best_metric rougeL needs eval.generate true"
    ),
    "adapter and random weights": Case(
        flags=f"{LORA} {FROM_SCRATCH}",
        sentence="adapter.method is lora and model.from_scratch true: an adapter needs a base with trained weights, which is "
        "there again when the adapter is loaded",
    ),
    "adapter and freezing": Case(
        flags=f"{LORA} --model.freeze ['lm_head.*']",
        sentence="model.freeze is ['lm_head.*'], but adapter.method lora freezes the whole base: leave it out",
    ),
    "adapter and another run's weights": Case(
        flags=f"{LORA} --model.init_from {{here}}/runs/other",
        sentence="adapter.method is lora and model.init_from {here}/runs/other: the adapter would belong to weights that "
        "model.name_or_path does not have; give the exported model as model.name_or_path",
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
    "merging without an adapter": Case(
        flags="--export.merge true",
        sentence="export.merge is true, but adapter.method is none: there is no adapter to merge",
    ),
    "adapter without its method": Case(
        flags="--adapter.name_or_path {here}/adapter",
        sentence="adapter.name_or_path is {here}/adapter, but adapter.method is none: set it to that adapter's method",
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
    "targets that match nothing": Case(
        flags=f"{LORA} --adapter.target_modules [q_proj,query]",
        sentence=f"adapter.target_modules query matches no module; {LINEAR} (all-linear takes all of them but the output head)",
    ),
    "targets that are no layers": Case(
        flags=f"{LORA} --adapter.target_modules self_attn",
        sentence="adapter.target_modules self_attn matches model.layers.0.self_attn, a LlamaAttention, but an adapter goes on "
        f"linear layers and embeddings; {LINEAR}",
    ),
    "modules to save that match nothing": Case(
        flags=f"{LORA} --adapter.modules_to_save [embed]",
        sentence="adapter.modules_to_save embed matches no module; ends of names that exist: down_proj, embed_tokens, …",
    ),
    "adapter on a tied head": Case(
        flags=f"{OTHER_MODEL} {LORA} --adapter.target_modules lm_head",
        files=model_files({**LLAMA, "tie_word_embeddings": True}),
        sentence="the adapter adapts lm_head.weight, which is one tied weight with model.embed_tokens.weight: the merged model "
        "would need two; leave it out of adapter.target_modules, or train it whole by adapter.modules_to_save",
    ),
    "adapter folder without adapter": Case(
        flags=OWN_ADAPTER,
        files={"adapter/README.md": ""},
        sentence="adapter.name_or_path {here}/adapter has no adapter_config.json: give the folder of an adapter saved by peft",
    ),
    "adapter of another method": Case(
        flags=OWN_ADAPTER,
        files=adapter(16, use_dora=True),
        sentence="adapter.name_or_path {here}/adapter is a dora adapter, but adapter.method is lora: set adapter.method dora",
    ),
    "adapter of a model with other modules": Case(
        flags=OWN_ADAPTER,
        files=adapter(16, target_modules=["c_attn"]),
        sentence="adapter.name_or_path {here}/adapter does not fit {here}/model: Target modules c_attn not found in the base "
        "model. Please check the target modules and try again.",
    ),
    "adapter of a wider model": Case(
        flags=OWN_ADAPTER,
        files=adapter(32),
        sentence="adapter.name_or_path {here}/adapter does not fit {here}/model: it has "
        "model.layers.0.self_attn.q_proj.lora_A.weight of shape (2, 32) instead of (2, 16)",
    ),
    "adapter with resized embeddings": Case(
        flags=OWN_ADAPTER,
        files=adapter(16, extra={"model.embed_tokens.weight": (401, 16)}),
        sentence="adapter.name_or_path {here}/adapter brings an embedding of its own, model.embed_tokens.weight of shape "
        "(401, 16), as after a resized vocabulary, which is not supported: resize the base, save it and give that as "
        "model.name_or_path",
    ),
    # The tokenizer, before a row is looked for.
    "tokenizer larger than the embeddings": Case(
        flags=OTHER_MODEL,
        files=model_files({**LLAMA, "vocab_size": 64}) | tokenizer_files(TOO_MANY_TOKENS, pad_token="<pad>", eos_token="word1"),
        sentence="the tokenizer of {here}/other has 100 tokens, but the model only 64 embeddings: take the tokenizer that "
        "belongs to the model; the vocabulary is not resized under sharding: resize the model with transformers' "
        "resize_token_embeddings and save it first",
    ),
    "neither a padding nor an end token": Case(
        flags=OTHER_MODEL,
        files=model_files(LLAMA) | tokenizer_files(TOO_MANY_TOKENS),
        sentence="the tokenizer of {here}/other has neither a padding nor an end token: set pad_token or eos_token in its "
        "tokenizer_config.json",
    ),
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
