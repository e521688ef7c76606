"""An optimizer's weights and state are the same on any number of ranks, and a checkpoint goes on exactly on another number."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.launch import run_on_ranks
from tests.support.optimizer_model import NUM_EXPERTS, SHAPES, WeightsOf, give_gradients
from toolkit.optimizers import OPTIMIZERS

NUM_STEPS, SAVED_STEP, SKIPPED_STEP = 8, 5, 3
TOLERANCE = {"adafactor": 1e-6, "adamw": 1e-6}
"""Adafactor rounds sums over rows in another order, torch's kernel the last elements of a shard; others are equal bit for bit."""
STRATEGIES = {"ddp": 2, "fsdp2": 3, "hsdp": 4, "offload": 2, "float8": 2}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def on_one() -> dict[str, Tensors]:
    return train("single", None)


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, Tensors]:
    return on_ranks("fsdp2", 2, folder, saves=True)


def on_ranks(strategy: str, num_ranks: int, *args: Any, **settings: Any) -> dict[str, Tensors]:
    where: dict[str, Any] = {"preset": "ddp_cpu", "overrides": {"num_processes": num_ranks, "mixed_precision": "no"}}
    first, *others = run_on_ranks(train, args=(strategy, *args, *settings.values()), **where)
    for other in others:
        assert_same(other, first)
    return dict(first)


def assert_same(found: dict[str, Tensors], expected: dict[str, Tensors], *, exactly: bool = True) -> None:
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            close = 0.0 if exactly else TOLERANCE.get(name, 0.0)
            message = f"{name}: {key}"
            torch.testing.assert_close(found[name][key], tensor, rtol=close, atol=close * float(tensor.max()), msg=message)


def test_two_ranks_are_one(on_one: dict[str, Tensors], on_two: dict[str, Tensors]) -> None:
    assert set(on_one) == set(OPTIMIZERS)
    assert_same(on_two, on_one, exactly=False)


@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES.items())
def test_other_strategies_are_one_process(strategy: str, num_ranks: int, on_one: dict[str, Tensors]) -> None:
    assert_same(on_ranks(strategy, num_ranks, None), on_one, exactly=False)


def test_what_two_ranks_saved_goes_on_alone_and_on_three(folder: Path, on_two: dict[str, Tensors]) -> None:
    """Were the state read otherwise than it was written, moments would be requantized or counts begin again."""
    assert_same(train("single", folder), on_two, exactly=False)
    assert_same(on_ranks("fsdp2", 3, folder), on_two, exactly=False)


def test_weights_in_bf16_are_rounded_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Also after a checkpoint; most elements have another value than the nearest one would be."""
    alone, on_two = train("bf16-single", None), on_ranks("bf16-fsdp2", 2, tmp_path, saves=True)
    assert set(alone) == set(OPTIMIZERS) - {"adamw"}
    for found in (on_two, on_ranks("bf16-fsdp2", 3, tmp_path), on_ranks("bf16-hsdp", 4, None), train("bf16-single", tmp_path)):
        assert_same(found, alone)
    weights = [tensor for tensors in alone.values() for key, tensor in tensors.items() if key.startswith("model.")]
    assert all(weight.dtype == torch.bfloat16 for weight in weights)


def train(strategy: str, folder: Path | None, saves: bool = False) -> dict[str, Tensors]:
    """On every rank, by optimizer: the unsharded weights and state after the last step.

    Args:
        folder: of the checkpoints after `SAVED_STEP`, one for each optimizer; None: neither read nor written.
        saves: write them, else begin with them.
    """
    from torch.distributed.tensor import DTensor

    from toolkit.checkpoint import load
    from toolkit.checkpoint.dcp import save_tensors
    from toolkit.checkpoint.state import state_tensors
    from toolkit.config.schema import OptimConfig
    from toolkit.training.optim import build_optimizer

    found, loads = {}, folder is not None and not saves
    in_bf16 = strategy.startswith("bf16-")
    for name in OPTIMIZERS if not in_bf16 else [name for name in OPTIMIZERS if name != "adamw"]:
        weights = WeightsOf(SHAPES).to(torch.bfloat16 if in_bf16 else torch.float32)
        model: Any = sharded_by(strategy.removeprefix("bf16-"), weights)
        for parameter in model.parameters():
            parameter.grad_dtype = None
        optimizer = build_optimizer(OptimConfig(name=name, lr=1e-2, weight_decay=0.1), model)  # type: ignore[arg-type]
        sharded: Any = SimpleNamespace(model=model, unwrapped=getattr(model, "module", model))
        if folder is not None and loads:
            saved: Any = SimpleNamespace(folder=folder / name, manifest={"world_size": 2})
            with patch.object(load, "check_identity"), patch.object(load, "load_random_state"):
                load.load_checkpoint(saved, sharded, optimizer, None)  # type: ignore[arg-type]
        for step in range(SAVED_STEP if loads else 0, NUM_STEPS):
            give_gradients(model, step)
            skips = step == SKIPPED_STEP
            for parameter in model.parameters():
                parameter.grad.mul_(torch.nan if skips else 1.0)
                if in_bf16 and step % 2:  # of a step with one micro-batch
                    parameter.grad = parameter.grad.bfloat16()
            optimizer.number = step + 1  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(skips))  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None and saves and step + 1 == SAVED_STEP:
                (folder / name).mkdir(exist_ok=True)
                save_tensors(state_tensors(sharded, optimizer), folder / name / "state")
        tensors = state_tensors(sharded, optimizer)
        whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in tensors.items()}
        found[name] = {key: t.detach().clone() for key, t in whole.items()}
    return found


def sharded_by(strategy: str, model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from toolkit.distributed.comm import world_size
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.float8 import is_sharded_with_cast
    from toolkit.parallel.wrap import place_experts

    if strategy == "single":
        return model
    build_accelerator()  # with the process group
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    shape, names = ((2, 2), ("replicas", "shards")) if strategy == "hsdp" else ((world_size(),), ("shards",))
    if strategy == "float8":
        wrap_for_float8(model)
    offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if strategy == "offload" else {}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place = functools.partial(place_experts, {NUM_EXPERTS}, mesh.size(-1))
    sharded = fully_shard(model, mesh=mesh, shard_placement_fn=place, **offload)
    assert is_sharded_with_cast(sharded) == (strategy == "float8")
    return sharded


def wrap_for_float8(model: torch.nn.Module) -> None:
    """Wrap the matrices whose rows two ranks share, as a float8 all-gather needs them; in place."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 2 and parameter.shape[0] % 2 == 0:
            linear = torch.nn.Linear(1, 1, bias=False)
            linear.weight = parameter
            model.register_parameter(name, Float8Linear.from_float(linear, config).weight)
