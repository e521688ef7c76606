"""One rank of `plan_error.py`: real training steps of a model with random weights, and the most memory that one step took.

Launched by accelerate with the settings as JSON. Every rank's figures are gathered; rank 0 prints them as the last line.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.measuring import memory_gib, restart_peak
from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import gather_objects, rank
from toolkit.launch.accelerator import build_accelerator, frozen_dtype
from toolkit.loss import scale_to_global_mean
from toolkit.models.config import load_model_config
from toolkit.models.freeze import cast_frozen
from toolkit.models.lora import add_adapter, is_enabled
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.models.tensor_reader import TensorReaders
from toolkit.models.weights import complete_readers, open_weights
from toolkit.objectives import objective_of
from toolkit.parallel.units import local_tensor
from toolkit.parallel.wrap import shard_model
from toolkit.tools.plan.strategy import load_strategy
from toolkit.tools.plan.subject import build_batch, build_subject
from toolkit.training.optim import build_optimizer, clip_gradients

NUM_WARMUP_STEPS = 2
"""Moments are there from the second on."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    accelerator = build_accelerator()
    config_class: Any = SummarizationConfig if settings["is_t5"] else LLMConfig
    config = load_config(config_class, [*settings["arguments"], f"--model.name_or_path={settings['model']}"])
    model_config = load_model_config(dataclasses.replace(config.model, from_scratch=True), objective_of(config))
    strategy = load_strategy(Path(settings["preset"]), settings["num_processes"])
    subject = build_subject(settings["model"], strategy, settings["arguments"], None)
    batch = move_to(accelerator.device, build_batch(subject, config.train.micro_batch_size_rows))
    if "attention_mask" in batch:
        batch["attention_mask"][0, -1] = 0  # as in any batch of real rows: without padding transformers drops the mask
    before_gib = memory_gib("VmRSS")
    model, readers = _load(config, accelerator, model_config, subject.skeleton)
    model.set_attn_implementation(subject.skeleton.config._attn_implementation)
    sharded = shard_model(accelerator, model, readers)
    optimizer = build_optimizer(config.optim, sharded.model)
    del model

    def take_step() -> None:
        for _ in range(settings["num_micro_batches"]):
            scale_to_global_mean(summed_loss(sharded.model, batch)[0], 1, 1).backward()
        clip_gradients(sharded.model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(NUM_WARMUP_STEPS):
        take_step()
    inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    at_rest_gib = _at_rest_bytes([*sharded.model.parameters(), *sharded.model.buffers(), *inputs], optimizer) / 2**30
    if strategy.kind == "ddp":  # its buckets, which nothing in Python holds
        at_rest_gib += sum(p.nbytes for p in sharded.model.parameters() if p.requires_grad) / 2**30
    restart_peak()
    take_step()
    figures = {"resident_gib": memory_gib("VmHWM") - before_gib}
    with (
        mock.patch.object(dist, "reduce_scatter_tensor", _freed_here(dist.reduce_scatter_tensor)),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        take_step()
    rise, left = _allocated_bytes(profiler)
    figures |= {"allocated_gib": at_rest_gib + rise / 2**30, "unseen_gib": left / 2**30}
    gathered = gather_objects(figures)
    if rank() == 0:
        print(json.dumps(gathered), flush=True)


def _load(config: Any, accelerator: Any, model_config: Any, skeleton: Any) -> tuple[Any, TensorReaders]:
    has_adapter = is_enabled(config.adapter)
    dtype = frozen_dtype(accelerator, config.model.frozen_dtype, has_adapter=has_adapter)
    from_scratch = dataclasses.replace(config.model, from_scratch=True)
    loaded_dtype = dtype if has_adapter else torch.float32
    model, weights = open_weights(from_scratch, model_config, objective_of(config), skeleton, loaded_dtype)
    if has_adapter:
        add_adapter(model, config.adapter, config.model)
        cast_frozen(model, dtype)
    return model.train(), complete_readers(model, weights, config.adapter, config.model, seed=0)


def _at_rest_bytes(tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Of the storages of these tensors and of the moments, on this rank."""
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {local_tensor(tensor).untyped_storage() for tensor in (*tensors, *moments)}
    return sum(num_bytes for num_bytes in {s.data_ptr(): s.nbytes() for s in storages}.values())


def _allocated_bytes(profiler: Any) -> tuple[int, int]:
    """The most that the CPU's allocator held above the start, and what it held at the end: what gloo's threads have freed,
    which the profiler does not see."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak, now


def _freed_here(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, whose buffers gloo's thread releases before this one: the profiler sees what this one frees."""

    def call(*args: Any, **options: Any) -> None:
        work = collective(*args, **{**options, "async_op": True})
        work.wait()
        time.sleep(0.25)

    return call


if __name__ == "__main__":
    main()
