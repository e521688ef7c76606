"""The optimizer with parameter groups, the learning rate as a function of the step, and clipping by the global gradient norm."""

import math
import re
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from toolkit.config.schema import OptimConfig, as_written
from toolkit.data.batch_plan import BatchPlan
from toolkit.distributed.rng import derive_seed
from toolkit.optimizers import build, with_defaults
from toolkit.optimizers.stepping import ShardedOptimizer, shard_groups
from toolkit.parallel.float8 import is_sharded_with_cast, refresh_scales
from toolkit.parallel.units import clean_name
from toolkit.private import private


def build_optimizer(config: OptimConfig, model: nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of a sharded model, without weight decay on norms and biases. Weights in bf16 are
    rounded at random, by bits of the `seed`, the step, their name and the position.

    Call it after sharding: FSDP2 replaces parameters, and accelerate's remapping of an earlier optimizer fails on the meta
    device.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    kinds = {name: type(module).__name__.lower() for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        # By names, because FSDP1 flattens shapes. DoRA's magnitudes are norms of the base's weights.
        is_norm = "norm" in kinds[name.rpartition(".")[0]] or "lora_magnitude_vector" in name
        is_bias = re.search(r"(^|[._])bias(\.|$)", name) is not None  # `relative_attention_bias.weight` too
        if parameter.requires_grad:
            (plain if is_norm or is_bias else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = build(with_defaults(config), [group for group in groups if group["params"]])
    if isinstance(optimizer, ShardedOptimizer):
        names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
        optimizer.rounding_key = lambda weight, number: derive_seed("rounding", seed, number, names[weight])
    if is_sharded_with_cast(model):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(model))
    return optimizer


def learning_rate(config: OptimConfig, step: int, num_steps: int, plan: BatchPlan) -> float:
    """Learning rate of the 1-based `step`. It is a pure function, so that a resume needs no scheduler state.

    Linear warm-up reaches `lr` at step `warmup_steps`, or at `warmup_ratio` of the steps, rounded up. The linear and cosine
    schedules then decay so that step `num_steps + 1` would be the first at `min_lr_ratio * lr`: the last step still updates, as
    in transformers. The `step` schedule multiplies by `gamma` every `decay_every_steps`, by default after each epoch of `plan`,
    whose epochs differ in steps under a budget of tokens.
    """
    warmup_steps = config.warmup_steps or math.ceil(as_written(config.warmup_ratio) * num_steps)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    progress = min(1.0, (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps))
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "step":
        every = config.decay_every_steps
        return config.lr * config.gamma ** ((step - 1) // every if every else plan.epoch(step))
    falling = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falling)


def describe_rate_change(config: OptimConfig, step: int, num_steps_before: int, num_steps: int, plan: BatchPlan) -> str | None:
    """A sentence if a run resumed at `step` has another learning rate there because its `num_steps` changed; else None."""
    expected = learning_rate(config, step, num_steps_before, plan)
    rate = learning_rate(config, step, num_steps, plan)
    if step > num_steps or math.isclose(rate, expected, rel_tol=0.01):
        return None
    last = learning_rate(config, step - 1, num_steps_before, plan)
    verb = "jumps up to" if rate > last else "drops to" if rate < expected else "is"
    return (
        f"the learning rate {verb} {rate:.3g} in step {step}, after {last:.3g} in step {step - 1}: the {config.schedule} "
        f"schedule now ends with step {num_steps}, before with step {num_steps_before} (where step {step} had {expected:.3g})"
    )


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | None, parameters: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
    """Scale gradients to a global 2-norm of at most `max_norm`; returns the norm before clipping, an fp32 scalar. Collective.

    The norm covers the gradient over all shards (accelerate#4219: the local norm is wrong under DTensor). Local squares are
    summed, then reduced over the mesh's shard dimension only, because replicas hold equal gradients. The host reads nothing.
    A rank may hold no part of the gradient: under FSDP1, or with more ranks than rows of a weight. `parameters` are the model's
    trainable ones in its order, in which squares are summed; None: looks for them.
    """
    gradients = [p.grad for p in parameters or model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    filled = [g for g in local if g.numel()]  # a small parameter has empty shards on some ranks
    if filled:
        squares = torch.stack(list(private("_foreach_norm")(filled, 2.0, dtype=torch.float32))).square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float32, device=next(model.parameters()).device)
    if isinstance(model, FullyShardedDataParallel):
        groups = [cast(dist.ProcessGroup, model.process_group)]
    else:
        groups = next((shard_groups(g) for g in gradients if isinstance(g, DTensor)), [])
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if max_norm is not None and filled:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        private("_foreach_mul_")(filled, scale)
    return norm
