"""One launch of `load_memory.py`, on every rank: `load_sides.py sharded|whole|trained FLAGS`; rank 0 prints figures as JSON.

The flags are those of `recipes/llm.py`; what runs is what the recipe runs from its model's structure to its
shards; `trained` adds steps and a checkpoint.
"""

import contextlib
import gc
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.checkpoint.save_sides import GOAL, IDENTITY, accumulate_gradients, seconds_of, update
from benchmarks.measuring import memory_gib
from toolkit.checkpoint.save import CheckpointWriter
from toolkit.checkpoint.state import TrainState
from toolkit.config.load import load_config
from toolkit.config.schema import CheckpointConfig, LLMConfig, OptimConfig
from toolkit.distributed.comm import gather_objects, rank
from toolkit.launch.accelerator import build_accelerator, frozen_dtype
from toolkit.models import weights
from toolkit.models.lora import is_enabled
from toolkit.models.safetensors_index import ShardedReadUnsupported
from toolkit.objectives import objective_of
from toolkit.parallel.units import local_tensor
from toolkit.parallel.wrap import ShardedModel, shard_model
from toolkit.training.model import begin_identity, build_skeleton, load_model
from toolkit.training.optim import build_optimizer
from toolkit.training.setup import Run

SAMPLED_EVERY_S = 0.005
NUM_STEPS, NUM_ROW_TOKENS = 4, 256
"""Steps that are timed, after a first one, and the tokens of each rank's row in each."""


def main() -> None:
    way, *flags = sys.argv[1:]
    config = load_config(LLMConfig, flags)
    accelerator = build_accelerator()
    dtype = frozen_dtype(accelerator, config.model.frozen_dtype, has_adapter=is_enabled(config.adapter))
    run = Run(config, objective_of(config), accelerator, dtype, Path(config.run.output_dir), {})
    build_skeleton(run)
    whole = patch.object(weights, "_open_files", side_effect=ShardedReadUnsupported("the benchmark asks for it"))
    gc.collect()
    gather_objects(None)
    before, started = read_memory(), time.monotonic()
    with sampled_peak() as peak, whole if way == "whole" else contextlib.nullcontext():
        model, readers = load_model(run)
        complete_identity = begin_identity(run, "", model, readers)
        sharded = shard_model(accelerator, model, readers)
        complete_identity()
    seconds = time.monotonic() - started
    gc.collect()
    figures = {
        "anonymous_peak": peak["RssAnon"] - before["RssAnon"],
        "anonymous_after": read_memory()["RssAnon"] - before["RssAnon"],
        "resident_peak": peak["VmRSS"] - before["VmRSS"],
        "seconds": seconds,
        "shard_bytes": sum(local_tensor(parameter).nbytes for parameter in sharded.unwrapped.parameters()),
        "num_parameters": sum(parameter.numel() for parameter in sharded.unwrapped.parameters()),
    }
    if way == "trained":
        figures |= train(sharded, Path(config.run.output_dir), before["RssAnon"])
    of_ranks = gather_objects(figures)
    if rank() == 0:
        print(json.dumps({name: max(of_rank[name] for of_rank in of_ranks) for name in figures}), flush=True)


def train(sharded: ShardedModel, folder: Path, before: int) -> dict[str, float]:
    """The median seconds of a step, the peak of anonymous memory above `before`, and the bytes of a checkpoint. Collective."""
    optimizer = build_optimizer(OptimConfig(lr=1e-4), sharded.model)

    def step() -> None:
        accumulate_gradients(sharded, 1, NUM_ROW_TOKENS)
        update(sharded, optimizer)

    with sampled_peak() as peak:
        seconds = [seconds_of(step) for _ in range(1 + NUM_STEPS)]
    writer = CheckpointWriter(folder / "run", sharded, optimizer, IDENTITY, CheckpointConfig(async_save=False), GOAL)
    writer.save(TrainState(step=1))
    save = writer.finish()
    assert save is not None
    if rank() == 0:
        shutil.rmtree(folder / "run")
    return {
        "trained_peak": peak["RssAnon"] - before,
        "step_s": statistics.median(seconds[1:]),
        "checkpoint_bytes": save.num_bytes,
        "moment_bytes": sum(local_tensor(t).nbytes for of in optimizer.state.values() for t in of.values() if torch.is_tensor(t)),
    }


def read_memory() -> dict[str, int]:
    """Bytes of this process: anonymous ones, and all that are resident."""
    return {name: round(memory_gib(name) * 2**30) for name in ("RssAnon", "VmRSS")}


@contextlib.contextmanager
def sampled_peak() -> Iterator[dict[str, int]]:
    """The highest values of `read_memory` within it, complete at its end."""
    peak, ended = read_memory(), threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLED_EVERY_S):
            for name, value in read_memory().items():
                peak[name] = max(peak[name], value)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
