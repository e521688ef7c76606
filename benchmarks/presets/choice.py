"""Chooses the preset for a model and a number of GPUs: the cheapest one that fits, by its memory plan."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.presets.page import CHOICE_FILE, hash_inputs
from toolkit.config.schema import Checkpointing
from toolkit.optimizers import state_bytes
from toolkit.tools.plan.plan import USABLE_SHARE
from toolkit.tools.plan.search import estimate_peak, largest_micro_batch
from toolkit.tools.plan.strategy import Strategy, load_strategy, with_checkpointing
from toolkit.tools.plan.subject import Subject, build_subject
from toolkit.tools.plan.trace import fake_ranks

GPUS = ((1, 24), (8, 24), (1, 80), (8, 80), (16, 80), (64, 80))
"""Number of GPUs, and GiB of each."""
GPUS_A_MACHINE = 8
LLM_ROWS = ["--data.max_length_tokens=4096"]
T5_ROWS = ["--data.max_source_length_tokens=512", "--data.max_target_length_tokens=128"]
LORA = ["--adapter.method=lora", "--adapter.target_modules=all-linear", "--adapter.rank=16"]
WAYS: dict[str, list[str]] = {"full": [], "LoRA": LORA, "QLoRA": [*LORA, "--adapter.base_dtype=nf4"]}
QLORA_MODELS = ("8B (Llama 3.1)", "70B (Llama 3.1)")


def _llama(hidden: int, inner: int, layers: int, heads: int, *, is_tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "0.2B (T5-base)": {
        "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
        "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
    },
    "3B (Llama 3.2)": _llama(3072, 8192, 28, 24, is_tied=True),
    "8B (Llama 3.1)": _llama(4096, 14336, 32, 32),
    "70B (Llama 3.1)": _llama(8192, 28672, 80, 64),
}  # fmt: skip
"""Shapes of well-known models, by their name on the page."""


def save_choice(folder: Path) -> None:
    """Plan every cell of the page and write `which_preset.json` into the folder of presets. Takes minutes.

    Raises:
        UserError: a preset is not valid.
    """
    cells = [
        {
            "model": model,
            "way": way,
            "num_gpus": num_gpus,
            "gpu_gib": gpu_gib,
            **choose_preset(subject, num_gpus, gpu_gib, folder),
        }
        for model in MODELS
        for way in WAYS
        if way != "QLoRA" or model in QLORA_MODELS
        for subject in [build_shape(model, way, folder)]
        for num_gpus, gpu_gib in GPUS
    ]
    text = json.dumps({"inputs": hash_inputs(folder), "cells": cells}, indent=1)
    (folder / CHOICE_FILE).write_text(text + "\n", encoding="utf-8")


def build_shape(model: str, way: str, folder: Path) -> Subject:
    """One of `MODELS` as it is trained, on the meta device."""
    strategy = load_strategy(folder / "fsdp2_full_shard.yaml", 1)
    rows = T5_ROWS if MODELS[model]["model_type"] == "t5" else LLM_ROWS
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS[model]))
        return build_subject(name, strategy, [*rows, *WAYS[way]], None)


def choose_preset(subject: Subject, num_gpus: int, gpu_gib: int, folder: Path) -> dict[str, Any]:
    """The first of `candidates` that fits: its name, a rank's peak in bytes with one row, and the most rows; else None each."""
    usable = int(gpu_gib * 2**30 * USABLE_SHARE)
    with fake_ranks(num_gpus):
        for name, strategy in candidates(num_gpus, gpu_gib, folder):
            if _state_bytes(subject, strategy) > usable:
                continue
            if (peak := estimate_peak(subject, strategy, rows=1)) <= usable:
                return {"preset": name, "peak_bytes": peak, "rows": largest_micro_batch(subject, strategy, usable)}
    return {"preset": None, "peak_bytes": None, "rows": None}


def candidates(num_gpus: int, gpu_gib: int, folder: Path) -> Iterator[tuple[str, Strategy]]:
    """Presets for this number of GPUs, the fastest first."""

    def load(preset: str) -> Strategy:
        return load_strategy(folder / f"{preset}.yaml", num_gpus, gpu_gib)

    def recomputing(name: str, preset: str, mode: Checkpointing) -> tuple[str, Strategy]:
        return f"{name}, {mode} checkpointing", with_checkpointing(load(preset), mode)

    whole = "fsdp2_full_shard" if num_gpus <= GPUS_A_MACHINE else "fsdp2_multi_node"
    if num_gpus == 1:
        yield "single", load("single")
        yield recomputing("single", "single", "selective")
        yield recomputing("single", "single", "full")
    else:
        yield "ddp", load("ddp")
        if num_gpus <= GPUS_A_MACHINE:
            yield "fsdp2_shard_grad_op", load("fsdp2_shard_grad_op")
        else:
            num_machines = num_gpus // GPUS_A_MACHINE
            mesh = dataclasses.replace(load("fsdp2_full_shard"), num_shards=GPUS_A_MACHINE, num_replicas=num_machines)
            yield "fsdp2_hsdp", mesh
        yield whole, load("fsdp2_full_shard")
        yield recomputing(whole, "fsdp2_full_shard", "selective")
    yield recomputing(whole, "fsdp2_full_shard", "full")
    yield "fsdp2_offload", load("fsdp2_offload")
    yield recomputing("fsdp2_offload", "fsdp2_offload", "full")


def _state_bytes(subject: Subject, strategy: Strategy) -> int:
    """Bytes of parameters and moments on one rank, a lower bound of the peak."""
    parameters = list(subject.skeleton.parameters())
    moments = sum(state_bytes(subject.config.optim.name, tuple(p.shape)) for p in parameters if p.requires_grad)
    return 0 if strategy.offload else (sum(p.nbytes for p in parameters) + moments) // strategy.num_shards
