"""A training step reads nothing back from the device: on a GPU the host would wait there, and the device for the host after it.

Without `toolkit.models.patches.masks` transformers reads. The same steps show that the recorder sees it, and where.
"""

import dataclasses
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.launch import run_on_ranks

FIND_PACKED, IS_PADDED, IS_PADDED_TOO = (
    f"transformers/masking_utils.py:{name} _local_scalar_dense"
    for name in ("find_packed_sequence_indices", "_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
)
LOOK_FOR_PADDING = "transformers/modeling_utils.py:warn_if_padding_and_no_attention_mask _local_scalar_dense"
READS_OF_TRANSFORMERS = {
    "t5 sdpa": {IS_PADDED: 2},  # encoder, and what the decoder sees of it
    "t5 eager": {IS_PADDED: 2},
    "bart sdpa": {IS_PADDED: 2, IS_PADDED_TOO: 1},
    "llama sdpa": {FIND_PACKED: 1},
    "llama eager": {FIND_PACKED: 1},
    "llama packed sdpa": {FIND_PACKED: 1},
    "llama packed eager": {FIND_PACKED: 1},
    "llama packed documents": {FIND_PACKED: 1},
    "gemma3 packed documents": {FIND_PACKED: 2},
    "mixtral packed documents": {FIND_PACKED: 1},
    "mixtral document packed documents": {FIND_PACKED: 1},
    "mixtral global packed documents": {FIND_PACKED: 2},  # its routing is counted first
    "llama-lora sdpa": {FIND_PACKED: 1},
    "mixtral-lora packed documents": {FIND_PACKED: 1},
    "gemma2 eager": {FIND_PACKED: 2},  # full and sliding attention; it has no sdpa
    "gemma2 packed eager": {FIND_PACKED: 2},
    "gpt2 sdpa": {FIND_PACKED: 1, LOOK_FOR_PADDING: 1},
}
"""By model, what a micro-batch read before `toolkit.models.patches.masks`."""
READS_OF_A_LOG_LINE = {f"tracking/step_log.py:flush {what}": 1 for what in ("cpu", "tolist", "_local_scalar_dense")}
"""`StepLog.flush` reads the figures of the steps since the last one, every `log_every_steps`. The scalar is the host's memory."""
READS_OF_A_FIRST_STEP = {"training/parameter_checks.py:_check tolist": 3, "training/parameter_checks.py:check tolist": 1}
"""Flags and hashes of the host, which the control group reduces on the CPU."""
NUM_MICRO_BATCHES = 2


@pytest.mark.parametrize("preset", ["single", "ddp_cpu", "fsdp2_cpu", "fsdp2_offload"])
def test_a_step_reads_nothing_from_the_device(preset, tmp_path):
    on_cpu = {"use_cpu": True, "num_processes": 1 if preset == "single" else 2}
    for of_rank in run_on_ranks(
        reads_of_all_models, preset=preset, overrides={"mixed_precision": "no"} | on_cpu, args=(tmp_path,)
    ):
        assert set(of_rank) == set(READS_OF_TRANSFORMERS)
        for model, (without_masks, first_step, second_step, log_line) in of_rank.items():
            expected = {place: number * NUM_MICRO_BATCHES for place, number in READS_OF_TRANSFORMERS[model].items()}
            assert without_masks == expected, model
            assert second_step == {}, model
            assert (first_step, log_line) == (READS_OF_A_FIRST_STEP, READS_OF_A_LOG_LINE), model


@pytest.mark.parametrize("preset", ["single", "ddp_cpu"])
def test_experts_in_bf16_read_no_sizes_of_groups(preset, tmp_path):
    on_cpu = {"use_cpu": True, "num_processes": 1 if preset == "single" else 2}
    overrides = {"mixed_precision": "bf16"} | on_cpu
    for of_rank in run_on_ranks(reads_of_mixtures, preset=preset, overrides=overrides, args=(tmp_path,)):
        assert of_rank == {"mixtral packed documents": {}, "mixtral-lora packed documents": {}}


def reads_of_mixtures(folder: Path) -> dict[str, dict[str, int]]:
    """On every rank, by model: the reads of a second step."""
    from toolkit.launch.accelerator import build_accelerator

    accelerator = build_accelerator()
    names = ("mixtral packed documents", "mixtral-lora packed documents")
    return {name: reads_of_two_steps(name, accelerator, folder)[1] for name in names}


def reads_of_all_models(folder: Path) -> dict[str, tuple[dict[str, int], ...]]:
    """On every rank, by model: the reads of a second step without `masks`, and of a first step, a second one and a log line."""
    from unittest.mock import patch

    from toolkit.launch.accelerator import build_accelerator
    from toolkit.models.patches import masks

    accelerator = build_accelerator()
    found = {}
    for model in READS_OF_TRANSFORMERS:
        with patch.object(masks, "install", lambda model: None):
            _, without_masks, _ = reads_of_two_steps(model, accelerator, folder)
        found[model] = (without_masks, *reads_of_two_steps(model, accelerator, folder))
    return found


def reads_of_two_steps(name: str, accelerator, folder: Path) -> tuple[dict[str, int], ...]:
    """The reads of two whole steps of `loop.train_step` and of the log line after them."""
    from tests.support.host_reads import recorded

    run = build_run(name, accelerator, folder)
    found: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    in_bf16 = accelerator.mixed_precision == "bf16"
    take_two_steps(run, (recorded(found[0], in_bf16=in_bf16), recorded(found[1], in_bf16=in_bf16)))
    assert len(run.log.pending[-1].micro_batches) == NUM_MICRO_BATCHES
    with recorded(found[2]):
        run.log.flush()
    return tuple(map(dict, found))


def take_two_steps(run, contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]) -> None:
    """The first two steps of a run as its loop takes them, each in its context."""
    from unittest.mock import Mock

    from toolkit.training import loop
    from toolkit.training.parameter_checks import ParameterWatch
    from toolkit.training.run import build_log
    from toolkit.training.skip_guard import SkipGuard

    watch = ParameterWatch(run.sharded.model, 0)
    run.sharded.model.train()
    run.guard = SkipGuard(run.config.optim, run.state.skips, loop.reduction_groups(run.sharded.model))
    run.log, run.writer = build_log(run), Mock()
    micro_batches = loop._load_micro_batches(run, 1)
    for number, context in zip((1, 2), contexts, strict=True):
        with context:
            run.log.add(loop.train_step(run, run.plan.step(number), micro_batches, 1e-3, watch if number == 1 else None))


def build_run(name: str, accelerator, folder: Path):
    """A run of a tiny model on a few random rows of different lengths, as far as its steps need one."""
    import numpy as np
    import torch
    from datasets import Dataset

    from toolkit.config.data import DataConfig, LLMDataConfig
    from toolkit.config.schema import AdapterConfig, LLMConfig, ModelConfig, OptimConfig, SummarizationConfig, TrainConfig
    from toolkit.data.batch_plan import BatchPlan
    from toolkit.data.collate import CausalCollator, SummarizationCollator
    from toolkit.distributed.comm import world_size
    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.models.patches.documents import BY_DOCUMENT
    from toolkit.objectives import built_in
    from toolkit.parallel.wrap import shard_model
    from toolkit.tracking.metrics_log import MetricsLog
    from toolkit.training.optim import build_optimizer
    from toolkit.training.setup import Run

    family, *options = name.split()
    is_seq2seq, is_packed = family in ("t5", "bart"), "packed" in options
    train = TrainConfig(
        max_steps=2, global_batch_size_rows=8 * world_size(), micro_batch_size_rows=2 if is_packed else 4, seed=0, num_epochs=None
    )
    model_config, optim = ModelConfig(name_or_path="tiny"), OptimConfig(skip_beyond_sigmas=3.0, skip_window_steps=2)
    auxiliary = next((option for option in options if option in ("document", "global")), "off")
    optim = dataclasses.replace(optim, router_aux_loss=auxiliary)
    config: Any
    collator: Any
    if is_seq2seq:
        config = SummarizationConfig(model=model_config, data=DataConfig(source="jsonl"), train=train, optim=optim)
        collator = SummarizationCollator(pad_token_id=0, decoder_start_token_id=0)
    else:
        config = LLMConfig(model=model_config, data=LLMDataConfig(source="jsonl"), train=train, optim=optim)
        collator = CausalCollator(pad_token_id=0, one_row=options[-1] == BY_DOCUMENT)
    lengths = [5 + 3 * (row % 4) for row in range(8 * world_size())]
    labels = [[9, 8, 1] if is_seq2seq else [-100, *range(4, 3 + n)] for n in lengths]
    num_labels = np.array([sum(label != -100 for label in of_row) for of_row in labels])
    columns = {"labels": labels, "num_tokens": lengths, "num_label_tokens": num_labels.tolist()}
    dataset = Dataset.from_dict({"input_ids": [list(range(3, 3 + n)) for n in lengths], **columns})
    plan = BatchPlan(np.array(lengths), num_labels, train, world_size(), pack_length_tokens=24 if is_packed else None)
    adapter = AdapterConfig(method="lora", target_modules=["q_proj", "v_proj"], experts="mixtral" in family)
    model = build_model(family.removesuffix("-lora"), options[-1], adapter if "lora" in name else None)
    sharded = shard_model(accelerator, model, notes=auxiliary != "off")
    objective = built_in(config.data.objective)
    evaluation = EvaluationRows(rows=dataset, tokenizer=None, collator=collator, objective=objective)
    run = Run(config, objective, accelerator, torch.float32, folder, {})
    run.rows, run.plan, run.evaluation = SimpleNamespace(train=dataset), plan, evaluation
    run.sharded, run.optimizer = sharded, build_optimizer(optim, sharded.model)
    run.metrics, run.num_steps = MetricsLog(folder / "metrics.jsonl", False), 2
    return run


def build_model(family: str, attention: str, adapter):
    import torch
    import transformers

    from tests.support.adapter_models import with_adapter
    from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, MIXTURES
    from toolkit.models.patches import documents

    documents.register()
    config_class, settings = {**FAMILIES, **CAUSAL_FAMILIES, **MIXTURES}[family]
    config = getattr(transformers, config_class)(vocab_size=256, **settings)
    auto_class = transformers.AutoModelForSeq2SeqLM if family in FAMILIES else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model if adapter is None else with_adapter(model, adapter)
