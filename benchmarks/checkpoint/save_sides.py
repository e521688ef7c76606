"""One launch of `save_blocking.py`, on every rank: `save_sides.py CONFIG.json`; rank 0 prints one JSON line of figures.

The fields of the config are those of `SidesConfig`. The toolkit's side is its own sharding, optimizer and `CheckpointWriter`; the
peer is a twin of the model that `Accelerator.prepare` has wrapped. Both have done an update, so that the moments exist.
"""

import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measuring import memory_gib, restart_peak
from toolkit.checkpoint.find import BestMetric
from toolkit.checkpoint.load import choose_checkpoint, load_checkpoint
from toolkit.checkpoint.save import CheckpointWriter, Save
from toolkit.checkpoint.state import Identity, TrainState
from toolkit.config.schema import CheckpointConfig, OptimConfig, RecipeConfig
from toolkit.distributed.comm import close_groups, gather_objects, rank, world_size
from toolkit.launch.accelerator import build_accelerator
from toolkit.loss import scale_to_global_mean
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel.wrap import ShardedModel, shard_model
from toolkit.training.optim import build_optimizer, clip_gradients

GOAL = BestMetric("loss", higher_is_better=False, measured_on={}, compared=())
IDENTITY = Identity({"eval.best_metric": "loss"}, "", "", {})
WITHOUT, SYNC, ASYNC = "no saves", "sync", "async"


@dataclass(frozen=True, kw_only=True)
class SidesConfig:
    """One launch."""

    part: str
    """`blocking` or `overhead`."""
    shape: dict[str, Any]
    """Of `LlamaConfig`."""
    work_folder: str
    rounds: int
    steps: int
    """Of `overhead`: between two saves."""
    step_s: float
    """Of `overhead`: seconds a step takes, about, by its number of micro-batches."""
    num_row_tokens: int
    """Of a micro-batch, which is one row on each rank."""


class Trained:
    """A sharded model with its optimizer, and one writer each for both ways to save."""

    def __init__(self, config: SidesConfig) -> None:
        self.accelerator = build_accelerator()
        torch.manual_seed(0)
        self.sharded: ShardedModel = shard_model(self.accelerator, build_model(config))
        self.optimizer = build_optimizer(OptimConfig(lr=1e-4), self.sharded.model)
        self.folder = Path(config.work_folder) / "run"
        self.writers = {
            side: CheckpointWriter(
                self.folder, self.sharded, self.optimizer, IDENTITY, CheckpointConfig(async_save=side == ASYNC), GOAL
            )
            for side in (ASYNC, SYNC)
        }
        self.steps = itertools.count(1)

    def step(self, num_micro_batches: int, num_row_tokens: int) -> None:
        """One update on random tokens. Collective."""
        accumulate_gradients(self.sharded, num_micro_batches, num_row_tokens)
        update(self.sharded, self.optimizer)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's shards of the weights and moments: what a save must copy before training may change it."""
        moments = [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        whole_or_shard = [*self.sharded.model.parameters(), *moments]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in whole_or_shard]

    def save(self, side: str) -> None:
        """As the loop does; returns when training may go on. Collective."""
        self.writers[side].save(TrainState(step=next(self.steps)))

    def finish(self, side: str) -> Save:
        """Wait for the save. Collective."""
        save = self.writers[side].finish()
        assert save is not None
        return save


def accumulate_gradients(sharded: ShardedModel, num_micro_batches: int, num_row_tokens: int) -> None:
    """Gradients of micro-batches of one row of random tokens on each rank. Collective."""
    vocab_size = sharded.unwrapped.config.vocab_size
    for _ in range(num_micro_batches):
        tokens = torch.randint(vocab_size, (1, num_row_tokens))
        batch = {"input_ids": tokens, "label_positions": torch.arange(num_row_tokens - 1), "labels": tokens[0, 1:]}
        loss_sum, _ = summed_loss(sharded.model, batch)
        num_label_tokens = num_micro_batches * world_size() * (num_row_tokens - 1)
        scale_to_global_mean(loss_sum, num_label_tokens, world_size()).backward()


def update(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients, take the optimizer's step, and drop them. Collective."""
    clip_gradients(sharded.model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def build_model(config: SidesConfig) -> Any:
    """Random weights in fp32."""
    return AutoModelForCausalLM.from_config(LlamaConfig(**config.shape), dtype=torch.float32)


def measure_blocking(config: SidesConfig) -> dict[str, Any]:
    """Seconds that a save keeps training waiting, by side and round; bytes; seconds of a resume. Collective."""
    ours = Trained(config)
    ours.step(1, config.num_row_tokens)
    accelerator = ours.accelerator
    twin = build_model(config)
    twin, optimizer = accelerator.prepare(twin, torch.optim.AdamW(twin.parameters(), lr=1e-4))
    tokens = torch.arange(config.num_row_tokens)[None] % twin.config.vocab_size
    accelerator.backward(twin(input_ids=tokens, labels=tokens, use_cache=False).loss)
    optimizer.step()
    optimizer.zero_grad()
    theirs = Path(config.work_folder)  # replaced by the folder of its last save
    blocking_s: dict[str, list[float]] = {ASYNC: [], SYNC: [], "save_state": []}
    write_s: list[float] = []
    resume_s: dict[str, list[float]] = {"toolkit": [], "load_state": []}
    sides = list(blocking_s)
    copies = [(tensor, tensor.clone()) for tensor in ours.tensors()]
    copy_s = []
    for number in range(config.rounds):
        copy_s.append(seconds_of(lambda: [copy.copy_(tensor) for tensor, copy in copies]))
        for turn in range(len(sides)):
            side = sides[(turn + number) % len(sides)]
            if side == "save_state":
                before, theirs = theirs, Path(config.work_folder) / f"peer-{number}"
                blocking_s[side].append(seconds_of(lambda folder=theirs: accelerator.save_state(str(folder))))  # type: ignore[misc]
                if rank() == 0 and number > 0:
                    shutil.rmtree(before)
            else:
                blocking_s[side].append(seconds_of(lambda side=side: ours.save(side)))  # type: ignore[misc]
                save = ours.finish(side)
                write_s += [save.write_s] if side == ASYNC else []
    for _ in range(config.rounds):
        resume_s["toolkit"].append(seconds_of(lambda: resume(ours)))
        resume_s["load_state"].append(seconds_of(lambda: accelerator.load_state(str(theirs))))
    return {
        "num_parameters": sum(unit.num_parameters for unit in ours.sharded.units),
        "blocking_s": blocking_s,
        "copy_s": copy_s,
        "write_s": write_s,
        "resume_s": resume_s,
        "num_bytes": {"toolkit": save.num_bytes, "save_state": num_bytes(theirs)},
    }


def resume(ours: Trained) -> None:
    """Choose the newest checkpoint, compare all its hashes, and load it. Collective."""
    newest = choose_checkpoint(ours.folder, "auto", IDENTITY.config, RecipeConfig)
    assert newest is not None
    load_checkpoint(newest, ours.sharded, ours.optimizer, IDENTITY)


def measure_overhead(config: SidesConfig) -> dict[str, Any]:
    """Seconds of `steps` steps after no save and after either one of ours; peak memory of the larger rank. Collective."""
    ours = Trained(config)
    ours.step(1, config.num_row_tokens)
    one_s = statistics.median(seconds_of(lambda: ours.step(2, config.num_row_tokens)) for _ in range(3)) / 2
    num_micro_batches = max(1, round(config.step_s / one_s))
    # In the first round a side's peak must not hold what another has left behind: the sync save takes less than the async one.
    sides = [WITHOUT, SYNC, ASYNC]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peak_gib: dict[str, list[float]] = {side: [] for side in sides}
    write_s: list[float] = []

    def block(side: str) -> None:
        if side != WITHOUT:
            ours.save(side)
        for _ in range(config.steps):
            ours.step(num_micro_batches, config.num_row_tokens)
        if side != WITHOUT:
            save = ours.finish(side)
            write_s.extend([save.write_s] if side == ASYNC else [])

    for number in range(config.rounds):
        for turn in range(len(sides)):
            side = sides[(turn + number) % len(sides)]
            restart_peak()
            seconds[side].append(seconds_of(lambda side=side: block(side)))  # type: ignore[misc]
            peak_gib[side].append(max(gather_objects(memory_gib("VmHWM"))))
    return {
        "num_parameters": sum(unit.num_parameters for unit in ours.sharded.units),
        "seconds": seconds,
        "peak_gib": peak_gib,
        "write_s": write_s,
        "num_step_tokens": num_micro_batches * world_size() * config.num_row_tokens,
    }


def seconds_of(work: Callable[[], Any]) -> float:
    """Of the rank that takes longest, from a moment when no rank has anything left to write. Collective."""
    os.sync()
    gather_objects(None)
    start_s = time.perf_counter()
    work()
    return max(gather_objects(time.perf_counter() - start_s))


def num_bytes(folder: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    config = SidesConfig(**json.loads(Path(sys.argv[1]).read_text()))
    figures = {"blocking": measure_blocking, "overhead": measure_overhead}[config.part](config)
    if rank() == 0:
        print(json.dumps(figures), flush=True)
    close_groups()


if __name__ == "__main__":
    main()
