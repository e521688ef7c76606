"""`verify` with its runs on the fork server, and faults that are put into them from outside.

A fault is a function that every rank calls before the recipe is run: it patches the toolkit as a mistake in it would change it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.launch import start
from toolkit.verification.verify import verify


def run_verify(output: Path, run_arguments: list[str], fault: str = "none", **settings: Any) -> bool:
    """`verify` on 2 processes on the CPU, as the command would be called."""
    launch = partial(launch_planted, fault)
    return verify(run_arguments, use_cpu=True, num_processes=2, output=output, launch=launch, **settings)


def launch_planted(fault: str, preset: Path, command: list[str], log_path: Path) -> int:
    """As `launching.launch`, by the fork server and with a fault."""
    with start(__file__, [fault, *command], preset=preset) as running:
        result = running.wait()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(result.stdout + result.stderr)
    return next((code for code in result.returncodes if code), 0)


def none() -> None:
    """No fault."""


def missing_gradient_average() -> None:
    """FSDP adds up the gradients of its ranks, where DDP still averages them."""
    from torch.distributed.fsdp import FSDPModule

    from toolkit import sharding

    shard_model = sharding.shard_model

    def summing(*args: Any) -> Any:
        sharded = shard_model(*args)
        for module in sharded.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return sharded

    sharding.shard_model = summing


def wrong_loss_divisor() -> None:
    """Each micro-batch is divided by its own label tokens and not by its share of the global batch's."""
    from toolkit import loop

    summed_loss = loop.summed_loss
    counted: list[int] = []

    def counting(model: Any, batch: Any) -> Any:
        counted.append(int((batch["labels"] != -100).sum()))
        return summed_loss(model, batch)

    loop.summed_loss = counting
    loop.share_of_global_mean = lambda loss_sum, num_label_tokens, world_size: loss_sum / max(1, counted[-1])


def untied_weight() -> None:
    """The output head has a weight of its own."""
    import torch

    from toolkit import stages

    load_model = stages.load_model

    def untying(*args: Any) -> Any:
        model, sources = load_model(*args)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        if sources is not None:
            sources["lm_head.weight"] = sources["shared.weight"]
        return model, sources

    stages.load_model = untying


def dropped_slice() -> None:
    """Rank 1 leaves its part of one tensor out of every checkpoint."""
    from toolkit import checkpoint_writer
    from toolkit.distributed import rank

    save_tensors = checkpoint_writer.save_tensors

    def dropping(tensors: dict[str, Any], folder: Path, group: Any) -> list[str]:
        left_out = next(name for name in tensors if name.endswith(".exp_avg"))
        kept = {name: tensor for name, tensor in tensors.items() if name != left_out or rank() != 1}
        return save_tensors(kept, folder, group)

    checkpoint_writer.save_tensors = dropping


def lost_slice() -> None:
    """Rank 1 writes zeros for its part of one tensor."""
    from toolkit import checkpoint_writer
    from toolkit.distributed import rank

    save_tensors = checkpoint_writer.save_tensors

    def losing(tensors: dict[str, Any], folder: Path, group: Any) -> list[str]:
        lost = next(name for name in tensors if name.endswith(".exp_avg"))
        written = {name: tensor * 0 if name == lost and rank() == 1 else tensor for name, tensor in tensors.items()}
        return save_tensors(written, folder, group)

    checkpoint_writer.save_tensors = losing


def random_state_not_restored() -> None:
    """Dropout is drawn from the random state as it stands, as in most loops, and a resume does not restore it."""
    from toolkit import checkpoint, loop

    loop.seed_all = lambda *parts: None
    checkpoint.load_random_state = lambda folder, saved_world_size: None


def wrong_start() -> None:
    """FSDP2 starts with one weight that is not the model's."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from toolkit import sharding

    shard_model = sharding.shard_model

    def changing(*args: Any) -> Any:
        sharded = shard_model(*args)
        if isinstance(sharded.model, FSDPModule):
            with torch.no_grad():
                next(p for p in sharded.model.parameters() if p.requires_grad).mul_(1 + 2**-20)
        return sharded

    sharding.shard_model = changing


def silent_ddp() -> None:
    """accelerate takes DDP where the YAML says FSDP, as it does on a CPU."""
    from toolkit import accelerator

    accelerator._put_cpu_in_an_accelerators_place = lambda: None


PLANTED: tuple[Callable[[], None], ...] = (
    none, missing_gradient_average, wrong_loss_divisor, untied_weight, dropped_slice, lost_slice, random_state_not_restored,
    wrong_start, silent_ddp,
)  # fmt: skip
FAULTS = {fault.__name__: fault for fault in PLANTED}

if __name__ == "__main__":
    planted, _, module, *arguments = sys.argv[1:]
    FAULTS[planted]()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
