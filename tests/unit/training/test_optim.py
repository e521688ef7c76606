"""Parameter groups, the learning rate, and clipping."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.schema import OptimConfig, TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.tools.plan.trace import fake_ranks
from toolkit.training.optim import build_optimizer, clip_gradients, describe_rate_change, learning_rate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.relative_attention_bias = nn.Embedding(3, 2)  # as T5 names its own
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def plan_of(steps_per_epoch: int) -> BatchPlan:
    """Epochs of equally many steps, of one row each."""
    ones = np.ones(steps_per_epoch, dtype=np.int64)
    return BatchPlan(ones, ones, TrainConfig(global_batch_size_rows=1), world_size=1)


def rates(num_steps: int, steps_per_epoch: int = 5, **settings: object) -> list[float]:
    config, plan = OptimConfig(lr=1.0, **settings), plan_of(steps_per_epoch)
    return [round(learning_rate(config, step, num_steps, plan), 6) for step in range(1, num_steps + 1)]


def test_norms_and_biases_are_not_decayed_and_tied_weights_come_once():
    model = Model()
    model.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(4, 1, bias=False)})  # norms of DoRA
    decayed, plain = build_optimizer(OptimConfig(weight_decay=0.1), model).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0)
    assert {id(p) for p in decayed["params"]} == {id(model.embed.weight), id(model.linear.weight)}
    biases = [model.linear.bias, model.layer_norm.bias, model.relative_attention_bias.weight]
    norms = [model.layer_norm.weight, *model.lora_magnitude_vector.parameters()]
    assert {id(p) for p in plain["params"]} == {*map(id, biases), *map(id, norms)}
    model.embed.weight.requires_grad_(False)
    model.linear.requires_grad_(False)
    (group,) = build_optimizer(OptimConfig(), model).param_groups
    assert len(group["params"]) == 4, "frozen ones are left out"


def test_schedules():
    assert rates(5, schedule="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1]
    assert rates(5, schedule="constant", warmup_ratio=0.3) == [0.5, 1, 1, 1, 1], "rounded up"
    assert rates(1, warmup_ratio=0.1) == [1]
    assert rates(100, warmup_ratio=0.07) == rates(100, warmup_steps=7), "though 0.07 * 100 is more than 7 in binary"
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(6, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == [0.5, 1, 1, 0.8, 0.6, 0.4]
    assert rates(4, schedule="cosine") == [1, 0.853553, 0.5, 0.146447]
    assert rates(6, schedule="step", gamma=0.5, decay_every_steps=2) == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates(6, schedule="step", gamma=0.5, steps_per_epoch=3) == [1, 1, 1, 0.5, 0.5, 0.5]


def test_the_step_schedule_decays_where_epochs_of_a_token_budget_end():
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    plan = BatchPlan(lengths, lengths, TrainConfig(global_batch_size_tokens=100), world_size=1)
    ends = [plan.num_steps(epoch) for epoch in range(1, 6)]
    assert ends != [plan.steps_per_epoch * epoch for epoch in range(1, 6)], "epochs differ in steps"
    config = OptimConfig(lr=1.0, schedule="step", gamma=0.5)
    for epoch, end in enumerate(ends):
        assert [learning_rate(config, end + later, ends[-1] + 1, plan) for later in (0, 1)] == [0.5**epoch, 0.5 ** (epoch + 1)]


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_clipping_is_that_of_torch(max_norm):
    ours, theirs = Model(), Model()
    torch.manual_seed(0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(clip_gradients(ours, max_norm), expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("holds", ["no gradient", "an empty one"])
def test_a_rank_without_a_part_of_the_gradient_clips_nothing(holds):
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(0, 4))
    if holds == "an empty one":
        model.weight.grad = torch.zeros_like(model.weight)
    torch.testing.assert_close(clip_gradients(model, 1.0), torch.tensor(0.0))


def test_adamw_updates_shards_as_torch_does_and_keeps_its_state_in_dtensors():
    """Uneven shards, an empty one among them, and a skipped update; the moments lie where a checkpoint looks for them."""
    config, models, optimizers = OptimConfig(weight_decay=0.1), [], []
    with fake_ranks(8), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        for _ in range(2):
            torch.manual_seed(0)
            models.append(fully_shard(Model(), mesh=init_device_mesh("cpu", (8,))))
            optimizers.append(build_optimizer(config, models[-1]))
        optimizers[1] = torch.optim.AdamW(optimizers[1].param_groups, fused=True)
        for step, found_inf in enumerate((0.0, 1.0, 0.0)):
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(step)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.found_inf = torch.tensor(found_inf)
                with OpsOnDTensors() as seen:
                    optimizer.step()
                if step:  # the first one makes the moments
                    assert bool(seen.ops) == (optimizer is optimizers[1]), seen.ops
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            ours, theirs = ({"weight": p, **optimizer.state[p]} for p, optimizer in zip((a, b), optimizers, strict=True))
            assert ours["step"] == theirs["step"] == 2
            for name in ("weight", "exp_avg", "exp_avg_sq"):
                assert ours[name].placements == theirs[name].placements == a.placements
                assert torch.equal(ours[name].to_local(), theirs[name].to_local()), name


class OpsOnDTensors(TorchDispatchMode):
    """Lists the operations that get a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.ops.append(func)
            return NotImplemented
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "step", "before", "now", "begins"),
    [
        ({}, 11, 10, 20, "jumps up to 0.5 in step 11, after 0.1 in step 10"),
        ({"schedule": "cosine"}, 11, 10, 20, "jumps up to 0.5 in step 11, after 0.0245 in step 10"),
        ({}, 6, 20, 10, "drops to 0.5 in step 6, after 0.8 in step 5"),
        ({}, 6, 10, 11, "is 0.545 in step 6, after 0.6 in step 5"),
        ({}, 6, 1000, 1001, None),
        ({}, 11, 20, 10, None),
        ({"warmup_steps": 8}, 6, 10, 20, None),
        ({"warmup_ratio": 0.5, "schedule": "constant"}, 6, 10, 20, "drops to 0.6 in step 6, after 1 in step 5"),
        ({"warmup_ratio": 0.5, "schedule": "constant"}, 11, 10, 20, None),
        *(({"schedule": schedule}, 6, 10, 20, None) for schedule in ("constant", "step")),
    ],
)
def test_a_learning_rate_that_another_length_changes_is_said(settings, step, before, now, begins):
    config = OptimConfig(lr=1.0, **{"schedule": "linear", "warmup_steps": 0} | settings)
    sentence = describe_rate_change(config, step, before, now, plan_of(5))
    assert (sentence is None) == (begins is None)
    assert not sentence or sentence.startswith(f"the learning rate {begins}: the {config.schedule} schedule now ends with")
