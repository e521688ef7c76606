"""The same curve and gradients of a causal model, whole or with an adapter, however it is cut, packed, sharded and computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_invariants import BY_SIZE, CHECKPOINTING, COMPILED, check_evaluation, check_rows
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import (
    Finished,
    check_curve,
    check_gradients,
    figures,
    run_recipes,
    train_and_record_gradients,
    train_without_export,
)

FSDP1 = GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"]
PACKED = ["--data.packing", "true"]
LORA = ["--adapter.method", "lora", "--adapter.rank", "4"]

# name: preset, overrides of its YAML, flags, most logits at once
Runs = dict[str, tuple[str, dict[str, Any], list[str], int]]
RUNS: Runs = {
    "single": ("single", {}, ["--train.micro_batch_size_rows", "4"], 2**26),
    "single-packed-chunked": ("single", {}, [*PACKED, "--train.micro_batch_size_rows", "2"], 2000),
    "ddp-packed": ("ddp_cpu", {}, [*PACKED, "--train.micro_batch_size_rows", "1"], 2**26),
    "fsdp2-chunked": ("fsdp2_cpu", {}, ["--train.micro_batch_size_rows", "2", "--eval.unshard", "never"], 2000),
    "fsdp2-packed": ("fsdp2_cpu", {}, [*PACKED, "--train.micro_batch_size_rows", "4", "--data.num_loader_workers", "1"], 2**26),
    "fsdp2-checkpointing": ("fsdp2_cpu", CHECKPOINTING, [*PACKED, "--train.micro_batch_size_rows", "1"], 2000),
    "fsdp2-by-size": ("fsdp2_cpu", BY_SIZE, ["--train.micro_batch_size_rows", "2", "--eval.unshard", "never"], 2000),
    "fsdp2-compiled-checkpointing": ("fsdp2_cpu", COMPILED | CHECKPOINTING, PACKED, 2**26),
    "fsdp1-packed-chunked": ("fsdp1_full_shard", FSDP1, [*PACKED, "--train.micro_batch_size_rows", "1"], 2000),
}
REFERENCE = "single"
KINDS = {"full": ("gemma3", []), "lora": ("gemma2", LORA)}
"""Gemma 3 attends to packed rows by document, Gemma 2 (a soft cap, so no sdpa) by a dense mask."""
CASES = [(kind, name) for kind in KINDS for name in RUNS if kind == "full" or "compiled" not in name]
"""An adapter's blocks are compiled in `test_quantized_base.py`."""
OTHERS = [(kind, name) for kind, name in CASES if name != REFERENCE]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths, and tiny Gemmas: tied, with a cap on their logits and windows on their attention."""
    folder = tmp_path_factory.mktemp("llm-invariants")
    random = np.random.Generator(np.random.PCG64(0))
    words = ["read", "write", "open", "close", "file", "path", "line", "text", "word", "count", "sort", "join"]
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(110):
            prompt = " ".join(random.choice(words, int(random.integers(3, 40))))
            completion = " ".join(random.choice(words, int(random.integers(1, 10))))
            file.write(json.dumps({"prompt": f"{row} {prompt}", "completion": completion}) + "\n")
    run_on_ranks(build_models, preset="single", overrides={"mixed_precision": "no"}, args=(folder,))
    return folder


def build_models(parent: Path) -> None:
    """Gemmas with random weights and a tokenizer, a folder each; on one process."""
    import torch
    import transformers

    from tests.support.model_folders import CAUSAL_FAMILIES, _build_tokenizer

    for family in ("gemma2", "gemma3"):
        torch.manual_seed(0)
        config_class, settings = CAUSAL_FAMILIES[family]
        options = settings | {"attention_dropout": 0.1, "final_logit_softcapping": 30.0}
        config = getattr(transformers, config_class)(vocab_size=256, **options)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(parent / family)
        _build_tokenizer(("<pad>", "</s>")).save_pretrained(parent / family)


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, Finished]:
    runs = {}
    for kind, name in CASES:
        (family, flags_of_kind), (preset, overrides, flags, max_logits) = KINDS[kind], RUNS[name]
        always = [
            "--model.name_or_path", str(folder / family), "--data.packing", "false", "--data.bucket_by_length", "false",
            "--data.max_length_tokens", "64", *flags_of_kind,
        ]  # fmt: skip
        where = {"preset": preset, "overrides": overrides, "recipe": "llm", "max_logits": max_logits}
        function = train_and_record_gradients if name == "fsdp2-by-size" else train_without_export
        runs[f"{kind}-{name}"] = {**where, "flags": [*always, *flags], "function": function}
    return run_recipes(folder, runs)


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_curve_and_gradients_are_those_of_one_process(finished: dict[str, Finished], kind: str, name: str) -> None:
    (expected_lines, expected_gradients), (lines, gradients) = finished[f"{kind}-{REFERENCE}"], finished[f"{kind}-{name}"]
    check_curve(lines, expected_lines, ("loss", "grad_norm", "num_rows", "num_tokens", "num_label_tokens"))
    check_gradients(gradients, expected_gradients[0])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_ranks_share_the_batch_without_overlap(folder: Path, finished: dict[str, Finished], kind: str, name: str) -> None:
    check_rows(folder / "runs", f"{kind}-{name}", f"{kind}-{REFERENCE}")


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_evaluation_is_that_of_one_process(folder: Path, finished: dict[str, Finished], kind: str, name: str) -> None:
    perplexity, loss = (figures(finished[f"{kind}-{name}"][0], "eval")[figure] for figure in ("perplexity", "loss"))
    np.testing.assert_allclose(perplexity, np.exp(loss))
    check_evaluation(folder / "runs", f"{kind}-{name}", f"{kind}-{REFERENCE}")


def test_only_adapters_train(finished: dict[str, Finished]) -> None:
    trained = finished[f"lora-{REFERENCE}"][1][0]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
