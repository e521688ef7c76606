"""An adapter on a quantized base trains as on the plain base of the dequantized weights, however it is packed and sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_invariants import CHECKPOINTING, COMPILED
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import (
    RELATIVE_TOLERANCE,
    Finished,
    check_curve,
    check_gradients,
    figures,
    run_recipes,
    train_and_record_gradients,
    train_without_export,
    write_inputs,
)
from toolkit.files.json_lines import load_json_lines

PACKED = ["--data.packing", "true"]
HSDP = GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"]
OFFLOAD = GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_offload"]
NF4, INT8 = ["--adapter.base_dtype", "nf4"], ["--adapter.base_dtype", "int8"]
DORA = ["--adapter.method", "dora"]
EXPERTS = ["--adapter.experts", "true"]
PLAIN = "plain"
"""The reference of each kind: plain LoRA, or DoRA, of one process on a folder with the dequantized weights."""

# name: kind, preset, overrides of its YAML, flags
RUNS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "nf4-plain": ("nf4", "single", {}, []),
    "nf4-single": ("nf4", "single", {}, NF4),
    "nf4-ddp-packed": ("nf4", "ddp_cpu", {}, [*NF4, *PACKED]),
    "nf4-fsdp2-packed-checkpointing": ("nf4", "fsdp2_cpu", CHECKPOINTING, [*NF4, *PACKED, "--eval.unshard", "never"]),
    "nf4-fsdp2-compiled": ("nf4", "fsdp2_cpu", COMPILED, NF4),
    "nf4-hsdp": ("nf4", "fsdp2_hsdp", HSDP, [*NF4, "--train.micro_batch_size_rows", "1"]),
    "nf4-offload": ("nf4", "fsdp2_offload", OFFLOAD, NF4),
    "int8-plain": ("int8", "single", {}, []),
    "int8-fsdp2-checkpointing": ("int8", "fsdp2_cpu", CHECKPOINTING, INT8),
    "dora-plain": ("nf4", "single", {}, DORA),
    "dora-fsdp2": ("nf4", "fsdp2_cpu", {}, [*DORA, *NF4]),
    "moe-plain": ("moe", "single", {}, EXPERTS),
    "moe-ddp-packed": ("moe", "ddp_cpu", {}, [*EXPERTS, *NF4, *PACKED]),
    "moe-fsdp2-checkpointing": (
        "moe",
        "fsdp2_cpu",
        CHECKPOINTING,
        [*EXPERTS, *NF4, "--export.merge", "true"],
    ),  # each expert is cut by rows
    "t5-plain": ("t5", "single", {}, []),
    "t5-fsdp2": ("t5", "fsdp2_cpu", {}, NF4),
}
COMPARED = [name for name in RUNS if not name.endswith(PLAIN)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tiny models of rows that 64 divides, and the same models with weights that were quantized and dequantized."""
    folder = tmp_path_factory.mktemp("quantized-base")
    for recipe in ("llm", "t5"):
        write_inputs(folder / recipe)
    rows = load_json_lines(folder / "t5" / "rows.jsonl")
    lines = [json.dumps({"prompt": row["source"], "completion": row["target"]}) for row in rows]
    (folder / "llm" / "rows.jsonl").write_text("\n".join(lines))
    run_on_ranks(build_models, preset="single", overrides={"mixed_precision": "no"}, args=(folder / "models",))
    return folder


def build_models(parent: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from tests.support.model_folders import _build_tokenizer
    from toolkit.models.quantized import dequantize, find_scales, quantize

    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes_of_qwen = {"hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}
    qwen = transformers.Qwen3Config(**sizes, **sizes_of_qwen, intermediate_size=128)
    moe = transformers.Qwen3MoeConfig(**sizes, **sizes_of_qwen, moe_intermediate_size=64, num_experts=3, num_experts_per_tok=2)
    t5 = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    for name, config in {"llm": qwen, "moe": moe, "t5": t5}.items():
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        model.from_config(config, dtype=torch.float32).save_pretrained(parent / name)
        for kind in ("nf4", "int8"):
            model.from_pretrained(parent / name).save_pretrained(parent / f"{name}-{kind}")
            tensors = load_file(parent / f"{name}-{kind}" / "model.safetensors")
            for key, weight in tensors.items():
                if weight.ndim == 2 and not any(
                    end in key for end in ("embed", "shared", "lm_head", "relative_attention_bias", "mlp.gate.")
                ):
                    tensors[key] = dequantize(quantize(weight, kind), find_scales(weight))
            save_file(tensors, parent / f"{name}-{kind}" / "model.safetensors", metadata={"format": "pt"})
        for place in (name, f"{name}-nf4", f"{name}-int8"):
            _build_tokenizer(("<pad>", "</s>")).save_pretrained(parent / place)


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, Finished]:
    runs: dict[str, dict[str, dict[str, Any]]] = {"llm": {}, "t5": {}}
    for name, (kind, preset, overrides, flags) in RUNS.items():
        recipe = "t5" if kind == "t5" else "llm"
        base = kind if kind in ("t5", "moe") else "llm"
        model = f"{base}-{'int8' if kind == 'int8' else 'nf4'}" if name.endswith(PLAIN) else base
        always = ["--model.name_or_path", str(folder / "models" / model), "--adapter.method", "lora", "--adapter.rank", "4"]
        if recipe == "llm":
            always += ["--data.packing", "false", "--data.bucket_by_length", "false", "--data.max_length_tokens", "64"]
        where = {"preset": preset, "overrides": overrides, "recipe": recipe}
        function = train_and_record_gradients if "--export.merge" in flags else train_without_export
        runs[recipe][name] = {**where, "flags": [*always, *flags], "function": function}
    return {name: run for recipe, of_recipe in runs.items() for name, run in run_recipes(folder / recipe, of_recipe).items()}


@pytest.mark.parametrize("name", COMPARED)
def test_curve_and_gradients_are_those_of_the_plain_dequantized_base(finished: dict[str, Finished], name: str) -> None:
    (expected_lines, expected_gradients), (lines, gradients) = finished[f"{name.partition('-')[0]}-{PLAIN}"], finished[name]
    check_curve(lines, expected_lines, ("loss", "grad_norm", "num_rows", "num_tokens", "num_label_tokens"))
    check_gradients(gradients, expected_gradients[0])
    expected, actual = (figures(of, "eval") for of in (expected_lines, lines))
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=RELATIVE_TOLERANCE)
